"""The report of a run: one self-contained page of HTML, which needs no network."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from trireme.dashboards.charts import line_chart, stacked_bars, template
from trireme.dashboards.totals import (
    Curves,
    WorkerTotals,
    paces,
    server_rows,
    slowest,
    worker_totals,
)
from trireme.launch.run_directory import JobRecord
from trireme.monitor.recording import UNSAVED
from trireme.printable import size
from trireme.records.numbers import number, number_of
from trireme.records.records import Start
from trireme.screen.job_state import PHASES, SHOWN_PHASES

_COUNTS = ("speed/", "updates/", "bytes/")
_ASIDE = (*_COUNTS, "learning_rate")
_PHASE_COLOURS = {"data": 0, "forward+backward": 2, "push": 5, "wait": 1, "apply": 3}


class CheckpointRow(NamedTuple):
    """A checkpoint: its directory's name, when it was saved, its size, its damage if any."""

    name: str
    saved_at: str = ""
    size: str = ""
    damage: str = ""


@dataclass(frozen=True, slots=True)
class ReportData:
    """The data of a report; each part may be missing."""

    title: str
    record: JobRecord | None = None
    starts: Sequence[Start] = ()
    curves: Curves = field(default_factory=dict)
    checkpoints: Sequence[CheckpointRow] = ()


def page(material: ReportData) -> str:
    """Returns the page."""
    workers = worker_totals(material.starts)
    record = material.record
    options = (
        [
            (name, "-" if value in (None, "") else str(value), record.origins.get(name, ""))
            for name, value in record.options.items()
        ]
        if record is not None
        else []
    )
    about = {} if record is None else {"job": record.job, "host": record.host}
    for start in material.starts:
        about |= {name: str(value) for name, value in start.begin.about.items()}
    return template("report.html.jinja").render(
        title=material.title,
        record=record,
        facts=list(_facts(material, workers)),
        curves=list(_curves(material.curves)),
        times=list(_times(material.starts, workers)),
        workers=list(_rows(workers)),
        servers=list(server_rows(material.starts)),
        events=[] if record is None else [(_duration(at), text) for at, text in record.events],
        chosen=[row for row in options if row[2] != "default"],
        defaults=[row for row in options if row[2] == "default"],
        checkpoints=material.checkpoints,
        damaged=any(row.damage for row in material.checkpoints),
        unsaved=list(_unsaved(material.starts)),
        about=list(about.items()),
    )


def _facts(material: ReportData, workers: Sequence[WorkerTotals]) -> Iterator[tuple[str, str]]:
    """Yields the most important facts: pairs (name, value)."""
    record = material.record
    last = [start.records[-1].status for start in material.starts if start.records]
    steps = [number_of(status, "global_step") for status in last]
    if steps:
        yield "global step", number(max(steps))
    if record is not None and record.ended is not None:
        yield "took", _duration(record.ended - record.started)
    if workers:
        yield "examples per second", number(round(sum(worker.pace for worker in workers)))
        yield "workers", str(len(workers))
    late = slowest(workers)
    if late is not None:
        yield "slowest worker", f"{late.name} ({late.own:.3g} ms)"
    for tag, runs in material.curves.items():
        if not tag.startswith(_ASIDE):
            for run, points in runs.items():
                if run != "train" or len(runs) == 1:
                    yield f"{run} {tag}", number(points[-1][1])
    if record is not None:
        yield "started", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.started))


def _unsaved(starts: Sequence[Start]) -> Iterator[str]:
    for start in starts:
        status = start.records[-1].status if start.records else {}
        if failed := int(number_of(status, "checkpoints_failed")):
            at_the_end = str(status.get(UNSAVED, "later ones were saved"))
            counted = f"{failed} checkpoint{'s' * (failed > 1)}"
            yield f"{start.begin.task} could not write {counted}: {at_the_end}"


def _curves(curves: Curves) -> Iterator[tuple[str, str]]:
    shown = [tag for tag in curves if not tag.startswith(_COUNTS)]
    for tag in sorted(shown, key=lambda tag: (tag.startswith("learning_rate"), tag != "loss", tag)):
        train_first = sorted(curves[tag].items(), key=lambda item: (item[0] != "train", item[0]))
        may_be_log = not tag.startswith("learning_rate")
        yield tag, line_chart(dict(train_first), "global step", tag, may_be_log=may_be_log)


def _times(starts: Sequence[Start], workers: Sequence[WorkerTotals]) -> Iterator[tuple[str, str]]:
    """Yields what shows where the time went: pairs (title, chart)."""
    rows = {
        worker.name: {
            SHOWN_PHASES.get(name, name): spent
            for name in PHASES
            if (spent := worker.milliseconds.get(name)) is not None
        }
        for worker in workers
        if worker.steps
    }
    if rows:
        yield "Milliseconds of a step, by phase", stacked_bars(rows, "ms", _PHASE_COLOURS)
    if pace := paces(starts):
        chart = line_chart(pace, "seconds since the start", "examples/s", from_zero=True)
        yield "Examples per second", chart


def _rows(workers: Sequence[WorkerTotals]) -> Iterator[tuple[str, ...]]:
    late = slowest(workers)
    for worker in workers:
        counts = (worker.starts, worker.steps, worker.applied, worker.stale, round(worker.pace))
        yield (
            worker.name + (" (slowest)" if worker is late else ""),
            worker.host,
            *map(number, counts),
            f"{worker.own:.3g}",
            size(worker.memory),
        )


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
