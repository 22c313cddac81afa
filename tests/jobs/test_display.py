"""What a program shows of a job, without the job."""

from __future__ import annotations

import io
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from trireme.jobs.display import ConsoleDisplay, Display, make_display
from trireme.jobs.messages import Progress
from trireme.launch.output import Console

HALF = Progress(
    step=50,
    max_steps=100,
    loss=0.5,
    examples_per_second=1234.0,
    tasks={"ps:0": "serving", "worker:0": "training", "worker:1": "training"},
)


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (Progress(), ""),
        (HALF, "global step 50/100  loss 0.5  1,234 examples/s  training"),
        (Progress(step=3), "global step 3"),
        (Progress(waits_for=("ps:0", "worker:1")), "waiting for ps:0, worker:1"),
    ],
)
def test_the_progress_is_one_line(progress: Progress, text: str) -> None:
    assert progress.text == text


def test_a_program_prints_what_the_command_prints() -> None:
    out, error = io.StringIO(), io.StringIO()
    display = ConsoleDisplay(Console(out, error, {}))
    display.line("worker:0", "training", False)
    display.line("worker:0", "a warning", True)
    display.progress(HALF)
    display.line("", "finished", True)
    display.progress(HALF, ended=True)
    assert out.getvalue() == "worker:0 | training\n"
    assert error.getvalue() == "worker:0 | a warning\ntrireme: finished\n"


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Has this process look like a kernel; gives what is displayed."""
    displayed: list[Any] = []

    class Handle:
        def update(self, content: Any, raw: bool) -> None:
            displayed.append(content)

    def display(what: Any, **options: Any) -> Handle:
        displayed.append(what)
        return Handle()

    ipython, part = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    part.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", part)
    return displayed


def test_a_notebook_shows_the_newest_lines_and_the_end(notebook: list[Any]) -> None:
    display = make_display(verbose=True)
    for number in range(30):
        display.line("worker:0", f"<line {number}>", False)
    assert len(notebook) < 30  # not one for each line
    display.line("", "finished", True)
    display.progress(HALF, ended=True)
    assert notebook[0] == {"text/plain": "starting"}
    first, *lines, last = notebook[-1]["text/plain"].splitlines()
    assert first == "━" * 16 + "╌" * 16 + f" {HALF.text}"
    assert lines == [f"worker:0 | <line {number}>" for number in range(19, 30)]
    assert last == "trireme: finished"


def test_silence_is_silent() -> None:
    assert type(make_display(verbose=False)) is Display
