"""`trireme top RUN`: shows a running job, or how one has ended."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.live import Live

from trireme.cli.runs import query
from trireme.errors import ConfigurationError, TriremeError
from trireme.launch.run_directory import RECORD, is_running, read_record
from trireme.location import local_directory
from trireme.records.records import read_starts
from trireme.screen.entry import TOP
from trireme.screen.job_state import JobSnapshot, TaskSnapshot, from_cluster
from trireme.screen.render import line, render

_FRAME_SECONDS = 0.25
_LINE_SECONDS = 1.0


def main(arguments: Sequence[str]) -> int:
    """Shows the job until it has ended, or until Ctrl-C; returns 0."""
    given = TOP.parser().read(arguments)
    console = Console()
    path = local_directory(given.run)
    if not console.is_terminal or console.is_dumb_terminal:
        for each in _pictures(path, _LINE_SECONDS):
            print(line(each), flush=True)
        return 0
    picture: JobSnapshot | None = None
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            for picture in _pictures(path, _FRAME_SECONDS):
                live.update(render(picture, console.width), refresh=True)
    except KeyboardInterrupt:
        pass
    if picture is not None:  # the previous screen is back: leave the last picture on it
        console.print(render(picture, console.width))
    return 0


def _pictures(path: Path, pause: float) -> Iterator[JobSnapshot]:
    seen: JobSnapshot | None = None
    while is_running(path):
        began = time.monotonic()
        seen = _now(path, seen)
        yield seen
        time.sleep(max(0.0, pause - (time.monotonic() - began)))
    yield _recorded(path, seen)


def _now(path: Path, seen: JobSnapshot | None) -> JobSnapshot:
    if not (path / RECORD).exists():
        return JobSnapshot(str(path), "starting", 0.0, ())
    record = read_record(path)
    if record.state != "running" or not record.coordinator:
        return _recorded(path, seen)  # it has just ended, or has no coordinator
    title, seconds = " ".join(record.command), time.time() - record.started
    try:
        return from_cluster(title, query(record, timeout=1.0), seconds)
    except TriremeError as error:
        note = f"the coordinator does not answer: {error}"
        before = seen or JobSnapshot(title, "running", seconds, ())
        return replace(before, title=title, phase="running", seconds=seconds, note=note)


def _recorded(path: Path, seen: JobSnapshot | None) -> JobSnapshot:
    """Returns a picture of a job from its records, which is not behind what was seen before.

    A task that was killed may lack its last record.
    """
    record = read_record(path) if (path / RECORD).exists() else None
    starts = read_starts(path, None if record is None else record.job)
    if record is None and not starts:
        raise ConfigurationError(
            f"nothing was run in {path}: it has neither {RECORD} nor records of tasks. Give the "
            "directory that `trireme run` named, or the program's run_dir"
        )
    over = record is not None and record.state != "running"
    tasks: dict[str, TaskSnapshot] = {}
    for start in starts:
        if start.records:
            name, status = start.begin.task, start.records[-1].status
            # The state that a task recorded last is that of its last step.
            state = "" if over else str(status.get("state", ""))
            tasks[name] = TaskSnapshot(name, state, status=status)
    times = [start.begin.time for start in starts]
    times += [each.time for start in starts for each in start.records]
    title, phase = str(path), "recorded"
    if record is not None:
        title, phase = " ".join(record.command), record.state
        times += [record.started, record.ended or time.time()]
    seconds = max(max(times) - min(times), 0.0 if seen is None else seen.seconds)
    for before in () if seen is None else seen.tasks:
        task = tasks.get(before.name)
        if task is not None and task.number("global_step") < before.number("global_step"):
            tasks[before.name] = replace(task, status=before.status)
    return JobSnapshot(title, phase, seconds, tuple(tasks.values()))
