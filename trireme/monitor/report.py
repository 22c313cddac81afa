"""The report of a run: one self-contained page of HTML, which needs no network."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from trireme.launch.run_directory import JobRecord
from trireme.monitor.charts import bar_chart, line_chart, stacked_bars
from trireme.monitor.curves import Curves, Points
from trireme.monitor.job_state import PHASES
from trireme.monitor.numbers import number, number_of, size
from trireme.monitor.records import Start
from trireme.monitor.worker_totals import WorkerTotals, paces, slowest, staleness_of, worker_totals

__all__ = ["CheckpointRow", "ReportData", "page"]

_COUNTS = ("speed/", "updates/", "bytes/")
_ASIDE = (*_COUNTS, "learning_rate")
_SHOWN_PHASES = {"compute": "forward+backward"}
_PHASE_COLOURS = {"data": 0, "forward+backward": 2, "push": 5, "wait": 1, "apply": 3}


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """One checkpoint: its directory's name, when it was saved, its bytes, its damage if any."""

    name: str
    saved_at: str
    nbytes: int
    damage: str = ""


@dataclass(frozen=True, slots=True)
class ReportData:
    """The data of a report; each part may be missing.

    Attributes:
        title: the title of the page.
        record: the launcher's record; None without one.
        starts: the records of the tasks.
        curves: the curves that the chief logged.
        checkpoints: the checkpoints, oldest first.
    """

    title: str
    record: JobRecord | None = None
    starts: Sequence[Start] = ()
    curves: Curves = field(default_factory=dict)
    checkpoints: Sequence[CheckpointRow] = ()


def page(material: ReportData) -> str:
    """Returns the page."""
    workers = worker_totals(material.starts)
    sections = [
        _summary(material, workers),
        _failure(material.record),
        _curves(material.curves),
        _time(material.starts, workers),
        _workers(workers),
        _configuration(material.record),
        _checkpoints(material.checkpoints),
        _environment(material),
    ]
    return _PAGE.format(
        title=escape(material.title),
        style=_STYLE,
        body="\n".join(section for section in sections if section),
    )


# Sections --------------------------------------------------------------------------------------


def _summary(material: ReportData, workers: Sequence[WorkerTotals]) -> str:
    facts = list(_facts(material, workers))
    tiles = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts
    )
    state = "" if material.record is None else material.record.state
    badge = f' <span class="badge {escape(state)}">{escape(state)}</span>' if state else ""
    command = ""
    if material.record is not None:
        command = f"<p><code>{escape(' '.join(material.record.command))}</code></p>"
    return (
        f"<header><h1>{escape(material.title)}{badge}</h1>{command}"
        f'<dl class="tiles">{tiles}</dl></header>'
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


def _failure(record: JobRecord | None) -> str:
    if record is None or not record.failure:
        return ""
    text = "\n".join(escape(line) for line in record.failure)
    return _section("Why it failed", f'<pre class="failure">{text}</pre>')


def _curves(curves: Curves) -> str:
    """Returns the curves of the loss, the metrics and the learning rate."""
    shown = [tag for tag in curves if not tag.startswith(_COUNTS)]
    shown.sort(key=lambda tag: (tag.startswith("learning_rate"), tag != "loss", tag))
    figures = [
        _figure(
            tag,
            line_chart(
                _train_first(curves[tag]),
                "global step",
                tag,
                may_be_log=not tag.startswith("learning_rate"),
            ),
        )
        for tag in shown
    ]
    return _section("Curves", _grid(figures)) if figures else ""


def _train_first(runs: Mapping[str, Points]) -> dict[str, Points]:
    return dict(sorted(runs.items(), key=lambda item: (item[0] != "train", item[0])))


def _time(starts: Sequence[Start], workers: Sequence[WorkerTotals]) -> str:
    figures = []
    rows = {
        worker.name: {
            _SHOWN_PHASES.get(name, name): spent
            for name in PHASES
            if (spent := worker.milliseconds.get(name)) is not None
        }
        for worker in workers
        if worker.steps
    }
    if rows:
        figures.append(
            _figure("Milliseconds of a step, by phase", stacked_bars(rows, "ms", _PHASE_COLOURS))
        )
    pace = paces(starts)
    if pace:
        chart = line_chart(pace, "seconds since the start", "examples/s", from_zero=True)
        figures.append(_figure("Examples per second", chart))
    bars = staleness_of(starts)
    if bars:
        chart = bar_chart(bars, "updates between a pull and its push", "pushes")
        figures.append(_figure("Staleness of pushes", chart))
    return _section("Where the time went", _grid(figures)) if figures else ""


def _workers(workers: Sequence[WorkerTotals]) -> str:
    if not workers:
        return ""
    late = slowest(workers)
    rows = [
        (
            worker.name + (" (slowest)" if worker is late else ""),
            worker.host,
            number(worker.starts),
            number(worker.steps),
            number(worker.applied),
            number(worker.stale),
            number(round(worker.pace)),
            f"{worker.own:.3g}",
            size(worker.memory),
        )
        for worker in workers
    ]
    head = ("worker", "host", "starts", "steps", "applied", "stale", "examples/s")
    return _section("Workers", _table((*head, "own ms/step", "memory"), rows, numbers_from=2))


def _configuration(record: JobRecord | None) -> str:
    if record is None:
        return ""
    rows = [
        (name, "-" if value in (None, "") else str(value), record.origins.get(name, ""))
        for name, value in record.options.items()
    ]
    head = ("option", "value", "from")
    chosen = [row for row in rows if row[2] != "default"]
    rest = [row for row in rows if row[2] == "default"]
    text = _table(head, chosen) if chosen else ""
    if rest:
        summary = f"{len(rest)} options as they are by default"
        text += f"<details><summary>{summary}</summary>{_table(head, rest)}</details>"
    return _section("Configuration", text)


def _checkpoints(rows: Sequence[CheckpointRow]) -> str:
    if not rows:
        return ""
    cells = [(row.name, row.saved_at, size(row.nbytes), row.damage) for row in rows]
    head = ("checkpoint", "saved", "size", "damage")
    if not any(row.damage for row in rows):
        head, cells = head[:3], [each[:3] for each in cells]  # type: ignore[assignment, misc]
    return _section("Checkpoints", _table(head, cells))


def _environment(material: ReportData) -> str:
    about: dict[str, str] = {}
    if material.record is not None:
        about["job"] = material.record.job
        about["host"] = material.record.host
    for start in material.starts:
        about.update({name: str(value) for name, value in start.begin.about.items()})
    return _section("Environment", _table(("what", "is"), list(about.items()))) if about else ""


# Pieces ----------------------------------------------------------------------------------------


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _grid(figures: Sequence[str]) -> str:
    return f'<div class="grid">{"".join(figures)}</div>'


def _figure(title: str, content: str) -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption>{content}</figure>"


def _table(
    head: Sequence[str], rows: Sequence[Sequence[str]], numbers_from: int | None = None
) -> str:
    def cells(row: Sequence[str], tag: str) -> str:
        first = len(row) if numbers_from is None else numbers_from
        return "".join(
            f"<{tag}{' class=n' if place >= first else ''}>{escape(text)}</{tag}>"
            for place, text in enumerate(row)
        )

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table><thead><tr>{cells(head, "th")}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""

_STYLE = """
:root{--bg:#fbfbfa;--card:#fff;--ink:#1c2024;--dim:#60646c;--rule:#e2e3e6;
--c0:#2563eb;--c1:#d9480f;--c2:#2b8a3e;--c3:#9c36b5;--c4:#0b7285;--c5:#a68a00}
@media(prefers-color-scheme:dark){:root{--bg:#15171a;--card:#1d2024;--ink:#eceef0;--dim:#a2a8b0;
--rule:#33373d;--c0:#7aa7ff;--c1:#ff9d66;--c2:#69d083;--c3:#d79be8;--c4:#5ccbdc;--c5:#e3c64b}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1240px;padding:20px 16px 48px;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
h1{font-size:1.5rem;line-height:1.25;margin:0;overflow-wrap:anywhere}
h2{font-size:1.1rem;margin:32px 0 10px}
code,pre{font:13px/1.5 ui-monospace,Menlo,Consolas,monospace}
header p{margin:6px 0 0;color:var(--dim);overflow-wrap:anywhere}
.badge{font-size:.8rem;font-weight:600;padding:2px 9px;border-radius:99px;vertical-align:middle;
background:var(--rule);white-space:nowrap}
.badge.finished{background:var(--c2);color:var(--bg)}
.badge.failed,.badge.lost{background:var(--c1);color:var(--bg)}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(150px,1fr));gap:10px;
margin:18px 0 0}
.tiles div,figure{background:var(--card);border:1px solid var(--rule);border-radius:8px}
.tiles div{padding:8px 12px}
dt{color:var(--dim);font-size:.8rem}
dd{margin:0;font-size:1.05rem;font-weight:600;font-variant-numeric:tabular-nums;
overflow-wrap:anywhere}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,340px),1fr));gap:12px}
figure{margin:0;padding:10px 12px;min-width:0}
figcaption{font-weight:600;margin-bottom:6px}
svg{display:block;width:100%;height:auto}
svg text{font-size:11px;fill:var(--dim)}
svg .mid{text-anchor:middle}svg .end{text-anchor:end}
.grid path{fill:none}
.line{stroke-width:1.8;stroke-linejoin:round}
.faint{opacity:.3;stroke-width:1}
svg path.grid{stroke:var(--rule);stroke-width:1}
.s0{stroke:var(--c0)}.s1{stroke:var(--c1)}.s2{stroke:var(--c2)}
.s3{stroke:var(--c3)}.s4{stroke:var(--c4)}.s5{stroke:var(--c5)}
.dot{fill:var(--card);stroke-width:2}
.fill{fill:var(--c0);stroke:none}
.b0{background:var(--c0)}.b1{background:var(--c1)}.b2{background:var(--c2)}
.b3{background:var(--c3)}.b4{background:var(--c4)}.b5{background:var(--c5)}
.key{list-style:none;display:flex;flex-wrap:wrap;gap:2px 14px;margin:8px 0 0;padding:0;
color:var(--dim);font-size:.85rem}
.key span{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:6px}
.row{display:grid;grid-template-columns:auto 1fr auto;gap:8px;align-items:center;margin:6px 0;
font-size:.85rem}
.row b{font-weight:500}.row i{font-style:normal;color:var(--dim);font-variant-numeric:tabular-nums}
.bar{display:flex;height:16px;border-radius:3px;overflow:hidden;background:var(--bg)}
.bar span{display:block;height:100%}
.scroll{overflow-x:auto;background:var(--card);border:1px solid var(--rule);border-radius:8px}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:5px 12px;border-top:1px solid var(--rule);white-space:nowrap}
thead th{border-top:0;color:var(--dim);font-weight:500}
.n{text-align:right}
summary{cursor:pointer;color:var(--dim);padding:8px 2px}
.failure{background:var(--card);border:1px solid var(--c1);border-left-width:4px;border-radius:8px;
padding:10px 14px;margin:0;white-space:pre-wrap;overflow-wrap:anywhere}
"""
