"""`trireme top RUN`: shows a running job, or replays one that has ended."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trireme.cli.command import number
from trireme.cli.parser import TOP
from trireme.cli.runs import local_run, query
from trireme.errors import ConfigurationError, TriremeError
from trireme.launch.run_directory import RECORD, is_running, read_record
from trireme.monitor.job_state import (
    JobSnapshot,
    at_the_end,
    from_cluster,
    from_records,
    span_of,
)
from trireme.monitor.records import Start, read_starts

_FRAME_SECONDS = 0.25
_LINE_SECONDS = 1.0
_REPLAY_SECONDS = 10.0


def main(arguments: Sequence[str]) -> int:
    """Shows the job until it has ended, or until Ctrl-C; returns 0."""
    given = TOP.parser().read(arguments)
    with local_run(given.run) as path:
        speed = given.speed and number("--speed", given.speed, "a number above 0", _finite)
        return _show(path, speed)


def _finite(speed: float) -> bool:
    return 0 < speed < math.inf


def _show(path: Path, speed: float | None) -> int:
    from rich.console import Console

    console = Console()
    terminal = console.is_terminal and not console.is_dumb_terminal
    frames = _frames(path, speed, _FRAME_SECONDS if terminal else _LINE_SECONDS)
    from trireme.monitor.top import line, render

    if not terminal:
        for each in frames:
            print(line(each), flush=True)
        return 0
    from rich.live import Live

    picture: JobSnapshot | None = None
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            for picture in frames:
                live.update(render(picture, console.width), refresh=True)
    except KeyboardInterrupt:
        pass
    if picture is not None:  # the previous screen is back: leave the last picture on it
        console.print(render(picture, console.width))
    return 0


def _frames(path: Path, speed: float | None, pause: float) -> Iterator[JobSnapshot]:
    if not is_running(path):
        yield from _replay(path, speed, pause)
        return
    seen: JobSnapshot | None = None
    while is_running(path):
        began = time.monotonic()
        seen = _now(path, seen)
        yield seen
        time.sleep(max(0.0, pause - (time.monotonic() - began)))
    yield _last(path, seen)


def _last(path: Path, seen: JobSnapshot | None) -> JobSnapshot:
    past = _past(path)
    return at_the_end(seen, from_records(past.title, past.phase, past.starts, past.end, past.began))


def _now(path: Path, seen: JobSnapshot | None) -> JobSnapshot:
    """Returns a picture of a running job, from its coordinator or else from its records."""
    if not (path / RECORD).exists():
        return JobSnapshot(str(path), "starting", 0.0, ())
    record = read_record(path)
    if record.state != "running":  # it has just ended, or the next job has just begun
        return _last(path, seen)
    title, seconds = " ".join(record.command), time.time() - record.started
    if record.coordinator:
        try:
            status = query(record, timeout=1.0)
        except TriremeError as error:
            note = f"the coordinator does not answer: {error}"
            return JobSnapshot(title, "running", seconds, (), note=note)
        return from_cluster(title, status, seconds)
    starts = read_starts(path, record.job)
    return from_records(title, "running", starts, time.time(), record.started)


def _replay(path: Path, speed: float | None, pause: float) -> Iterator[JobSnapshot]:
    """Yields pictures from the records, from the beginning to the end."""
    past = _past(path)
    title, starts, began, ended = past.title, past.starts, past.began, past.end
    speed = speed or max(1.0, (ended - began) / _REPLAY_SECONDS)
    if sys.stdout.isatty():
        moment = began + speed * pause
        while moment < ended:
            yield from_records(title, f"replay x{speed:.3g}", starts, moment, began)
            time.sleep(pause)
            moment += speed * pause
    yield from_records(title, past.phase, starts, ended, began)


@dataclass(frozen=True, slots=True)
class _Past:
    """A job that has ended: its title, how it ended, its records, and its time."""

    title: str
    phase: str
    starts: list[Start]
    began: float
    end: float


def _past(path: Path) -> _Past:
    record = read_record(path) if (path / RECORD).exists() else None
    starts = read_starts(path, None if record is None else record.job)
    began, end = span_of(starts)
    if record is not None:
        began, end = record.started, max(end, record.ended or record.started)
        return _Past(" ".join(record.command), record.state, starts, began, end)
    if not starts:
        raise ConfigurationError(
            f"nothing was run in {path}: it has neither {RECORD} nor records of tasks. Give the "
            "directory that `trireme run` named, or the program's run_dir"
        )
    return _Past(str(path), "recorded", starts, began, end)
