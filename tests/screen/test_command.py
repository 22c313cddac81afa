"""`trireme top` of a job that has just begun, that ends, and of one that is a stranger's."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from tests.cli.test_commands import EVIL, FINISHED
from tests.screen.test_job_state import WORKER, picture, task
from trireme.cli import main
from trireme.launch.run_directory import claim
from trireme.monitor.recording import records_directory
from trireme.records.records import Begin, Record, RecordWriter
from trireme.screen.command import _now, _recorded
from trireme.screen.render import render


def write_record(run: Path, task: str, time: float, **status: float | str) -> None:
    writer = RecordWriter(
        records_directory(run), Begin(task=task, job="abc", time=1.0, host="here", pid=1)
    )
    writer.write(Record(time=time, status=status), due=True)
    writer.close()


def test_a_job_that_has_only_just_been_claimed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    directory = claim(path)
    frames: list[float] = []

    def ends_soon(seconds: float) -> None:
        frames.append(seconds)
        directory.write_record(FINISHED)
        directory.release()

    monkeypatch.setattr("trireme.screen.command.time.sleep", ends_soon)
    assert main(["top", str(path)]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("0.0 s  starting  global step 0")
    assert "finished  global step 0" in last
    assert len(frames) == 1


def test_the_end_is_not_behind_what_was_seen(tmp_path: Path) -> None:
    seen = picture(task("worker", 0, **WORKER), task("worker", 1, **WORKER))
    directory = claim(tmp_path)
    directory.write_record(msgspec.structs.replace(FINISHED, ended=9.0))
    directory.release()
    write_record(tmp_path, "worker:0", 8.0, global_step=50, state="ended")
    write_record(tmp_path, "worker:1", 7.0, global_step=30, state="training")
    recorded = _recorded(tmp_path, None)
    assert (recorded.phase, recorded.seconds, recorded.step) == ("finished", 8.0, 50)
    end = _recorded(tmp_path, seen)
    assert (end.phase, end.seconds) == ("finished", 12.5)
    assert [each.number("global_step") for each in end.tasks] == [50, 40]
    assert [each.state for each in end.tasks] == ["", ""]


def test_what_was_seen_stays_while_the_coordinator_does_not_answer(tmp_path: Path) -> None:
    """As at the end of a job, before its record says that it has ended."""
    directory = claim(tmp_path)
    directory.write_record(
        msgspec.structs.replace(FINISHED, state="running", coordinator="tcp://127.0.0.1:9")
    )
    seen = picture(task("worker", 0, **WORKER))
    now = _now(tmp_path, seen)
    directory.release()
    assert (now.phase, now.tasks, now.step) == ("running", seen.tasks, seen.step)
    assert now.note.startswith("the coordinator does not answer: ")
    assert now.seconds > seen.seconds


@pytest.mark.parametrize("phase", ["finished", "running"])
def test_a_job_is_running_for_some_time_and_has_ended_after_it(phase: str) -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(render(replace(picture(task("worker", 0, **WORKER)), phase=phase), 100))
    word = "after" if phase == "finished" else "for"
    assert f"{phase} {word} 12.5 s" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_strangers_run_directory_controls_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], terminal: bool
) -> None:
    directory = claim(tmp_path)
    record = msgspec.structs.replace(
        FINISHED, state=f"finished{EVIL}", command=(f"train.py{EVIL}", "[bold]")
    )
    directory.write_record(record)
    directory.release()
    held = {"state": f"training{EVIL}", "primary_of": f"[0]{EVIL}"}
    write_record(tmp_path, f"worker:0{EVIL}", 2.0, **held)
    if terminal:  # as a terminal of 100 columns is drawn
        console = Console(file=io.StringIO(), width=100, height=40, no_color=True)
        console.print(render(_recorded(tmp_path, None), 100))
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        assert r"train.py\x0a\x1b[2J" in shown
    else:
        assert main(["top", str(tmp_path)]) == 0
        shown = capsys.readouterr().out
    assert not {each for each in shown if not each.isprintable()} - {"\n", "\u200b"}
