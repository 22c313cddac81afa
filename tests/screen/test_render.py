from __future__ import annotations

import io

import pytest
from rich.console import Console

from tests.screen.test_job_state import WORKER, picture, replicated, task
from trireme.screen.render import held, line, render


def test_a_job_in_one_line() -> None:
    seen = picture(task("worker", 0, **WORKER), missing=("ps:0",))
    assert line(seen) == (
        "12.5 s  running  global step 40/100  1,000 examples/s  the job waits for ps:0"
    )


@pytest.mark.parametrize("width", [60, 100, 160])
def test_a_terminal_shows_tasks_phases_and_lags(width: int) -> None:
    server = task("ps", 0, global_step=40, apply_seconds=0.0001, **{"lag/worker:0": 3})
    console = Console(file=io.StringIO(), width=width, height=40, no_color=True)
    console.print(render(picture(server, task("worker", 0, **WORKER)), width))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    (row,) = [each for each in text.splitlines() if each.startswith("worker:0")]
    assert "training" in row
    assert "1,000" in row
    bar = {60: "dccccwww", 100: "ddccccccwwww", 160: "dddccccccccccccwwwwwwwww"}
    assert f" {bar[width]}" in row
    assert (" 3 " in row) == (width >= 84)  # the lag
    assert all(len(each) <= width for each in text.splitlines())


@pytest.mark.parametrize("width", [80, 130])
def test_a_terminal_shows_who_holds_which_shards(width: int) -> None:
    holds = {"primary_of": "0, 1", "share": 1.0}
    seen = replicated(task("ps", 0, **holds), task("ps", 1, backup_of="0", joining_of="1"))
    console = Console(file=io.StringIO(), width=width, height=40, no_color=True)
    console.print(render(seen, width))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "generation 3: 2 shards, 2 copies of each" in text
    assert ("0, 1 100%" in text) == ("(0) [1]" in text) == (width >= 116)
    assert ("[being filled with]" in text) == (width >= 116)


def test_the_shards_of_a_server_fit_into_a_column() -> None:
    status = {"primary_of": "0, 3", "share": 0.5, "backup_of": "1", "joining_of": "2"}
    assert held(status) == "0, 3 50% (1) [2]"
    assert held({"primary_of": "", "backup_of": "1"}) == "(1)"
    assert held({}) == ""
