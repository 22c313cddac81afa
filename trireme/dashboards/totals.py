"""Curves of a run, from event files; and totals of each worker and server, from records."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trireme.printable import size
from trireme.records.numbers import number, number_of
from trireme.records.records import Record, Start
from trireme.screen.job_state import PHASES
from trireme.screen.render import held

Points = Sequence[tuple[float, float]]  # pairs (step, value), by step

Curves = dict[str, dict[str, Points]]
"""By the number's name, then by run, such as `train` or `test`."""

_LEAST_SECONDS = 0.3


def read_curves(directory: Path) -> Curves:
    """Returns every scalar under a directory of event files; none where there are none.

    For steps that were repeated after a resume, the newest values count; values that are not finite
    are left out.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    curves: Curves = {}
    runs = {path.parent for path in directory.glob("**/events.out.tfevents.*")}
    for run in sorted(runs):
        events = EventAccumulator(str(run), size_guidance={"scalars": 0})
        events.Reload()
        for tag in events.Tags()["scalars"]:
            points = {event.step: event.value for event in events.Scalars(tag)}
            finite = [(float(s), v) for s, v in sorted(points.items()) if math.isfinite(v)]
            if finite:
                curves.setdefault(tag, {})[run.relative_to(directory).as_posix()] = finite
    return curves


@dataclass(frozen=True, slots=True)
class WorkerTotals:
    """The totals of one worker over all its starts."""

    name: str
    host: str
    starts: int
    steps: int
    applied: int
    stale: int
    seconds: dict[str, float]
    pace: float
    memory: float

    @property
    def milliseconds(self) -> dict[str, float]:
        """The mean milliseconds of a step, by phase."""
        return {name: 1000 * spent / max(self.steps, 1) for name, spent in self.seconds.items()}

    @property
    def own(self) -> float:
        """The mean milliseconds of a step without waiting for other tasks."""
        spent = self.milliseconds
        return sum(spent.get(name, 0.0) for name in ("data", "compute", "apply"))


def worker_totals(starts: Sequence[Start]) -> list[WorkerTotals]:
    """Returns the totals of each worker with records."""
    return [_worker_totals(*each) for each in _by_name("worker", starts).items()]


def _worker_totals(name: str, starts: Sequence[Start]) -> WorkerTotals:
    last = [start.records[-1] for start in starts]
    seconds = {
        phase: sum(record.seconds.get(phase, 0.0) for record in last)
        for phase in PHASES
        if any(phase in record.seconds for record in last)
    }
    everything = [record for start in starts for record in start.records]
    paces = [value for _, value in _pace_points(everything)]
    return WorkerTotals(
        name=name,
        host=starts[-1].begin.host,
        starts=len(starts),
        steps=int(sum(number_of(record.status, "step") for record in last)),
        applied=int(sum(number_of(record.status, "applied") for record in last)),
        stale=int(sum(number_of(record.status, "stale") for record in last)),
        seconds=seconds,
        pace=sum(paces) / max(len(paces), 1),
        memory=max(number_of(record.status, "memory_bytes") for record in everything),
    )


def slowest(workers: Sequence[WorkerTotals]) -> WorkerTotals | None:
    """Returns the worker with the longest steps without waiting; None for fewer than two."""
    return max(workers, key=lambda worker: worker.own) if len(workers) > 1 else None


def paces(starts: Sequence[Start]) -> dict[str, Points]:
    """Returns each worker's examples per second over the seconds since the job began."""
    workers = [s for s in starts if s.begin.task.startswith("worker") and len(s.records) > 1]
    began = min((start.begin.time for start in workers), default=0.0)
    curves: dict[str, list[tuple[float, float]]] = {}
    for start in workers:
        points = [(time - began, pace) for time, pace in _pace_points(start.records)]
        curves.setdefault(start.begin.task, []).extend(points)
    return {name: points for name, points in curves.items() if points}


def _pace_points(records: Iterable[Record]) -> Iterator[tuple[float, float]]:
    before = math.inf
    for record in records:
        if number_of(record.status, "step") > 1 and record.time - before >= _LEAST_SECONDS:
            yield record.time, number_of(record.status, "examples_per_second")
        before = record.time


def server_rows(starts: Sequence[Start]) -> Iterator[tuple[str, ...]]:
    """Yields the totals of each server with records, as text.

    They are its name, host, shards, starts, takeovers, entries of logs with their size, and memory.
    """
    for name, own in _by_name("ps", starts).items():
        last = [start.records[-1].status for start in own]
        counted = ("takeovers", "log_entries", "log_bytes")
        takeovers, entries, nbytes = (sum(number_of(s, each) for s in last) for each in counted)
        everything = [record.status for start in own for record in start.records]
        yield (
            name,
            own[-1].begin.host,
            held(last[-1]),
            *map(number, (len(own), int(takeovers), int(entries))),
            size(nbytes),
            size(max(number_of(status, "memory_bytes") for status in everything)),
        )


def _by_name(role: str, starts: Sequence[Start]) -> dict[str, list[Start]]:
    found: dict[str, list[Start]] = {}
    for start in starts:
        if start.begin.task.startswith(f"{role}:") and start.records:
            found.setdefault(start.begin.task, []).append(start)
    return found
