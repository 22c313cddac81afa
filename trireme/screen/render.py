"""Renders the snapshot of a job for a terminal, or as one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trireme.cluster.messages import StatusValue
from trireme.printable import printable, size
from trireme.records.numbers import number_of
from trireme.screen.job_state import (
    SHOWN_PHASES,
    SILENT_SECONDS,
    JobSnapshot,
    TaskSnapshot,
    findings,
)
from trireme.screen.placement import summary

_COLOURS = {"data": "blue", "compute": "green", "push": "yellow", "wait": "red", "apply": "magenta"}
_LEFT = ("task", "state", "phases", "shards")
_OVER = ("finished", "failed", "interrupted", "lost")
_WIDE = {
    84: ("staleness", "lag"),
    100: ("applied", "stale"),
    116: ("shards",),
    132: ("memory",),
    156: ("pushed", "pulled"),
}
"""The columns that only terminals of some width show, by the least width."""


def line(picture: JobSnapshot) -> str:
    """Returns a job in one line: for logs and pipes."""
    end = f"/{picture.last_step}" if picture.last_step else ""
    parts = [
        f"{picture.seconds:.1f} s",
        picture.phase,
        f"global step {picture.step}{end}",
        f"{picture.pace:,.0f} examples/s",
        *([picture.note] if picture.note else []),
        *findings(picture),
    ]
    return printable("  ".join(parts))


def render(picture: JobSnapshot, width: int) -> RenderableType:
    """Returns a job for a terminal of `width` columns."""
    parts: list[RenderableType] = [_head(picture, width)]
    if picture.placement is not None and len(picture.of("ps")) > 1:
        parts.append(_text(summary(picture.placement), "dim"))
    parts.append(Text())
    if picture.tasks:
        parts += [_table(picture, width), Text(), _legend()]
        if len(picture.of("ps")) > 1 and width >= 116:
            key = "primary of, with the share of all parameters (backup of) [being filled with]"
            parts.append(Text(f"shards: {key}", style="dim"))
    for text in findings(picture):
        parts.append(_text(f"! {text}", "bold red"))
    if picture.note:
        parts.append(_text(picture.note, "dim"))
    return Group(*parts)


def _head(picture: JobSnapshot, width: int) -> RenderableType:
    end = f"/{picture.last_step}" if picture.last_step else ""
    word = "after" if picture.phase in _OVER else "for"
    text = Text.assemble(
        (printable(picture.title), "bold"),
        f"  {printable(picture.phase)} {word} {picture.seconds:.1f} s  ",
        f"global step {picture.step}{end}  {picture.pace:,.0f} examples/s",
    )
    if not picture.last_step:
        return text
    bar = ProgressBar(picture.last_step, picture.step, width=min(width, 60))
    return Group(text, bar)


def _table(picture: JobSnapshot, width: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    rows = [_cells(picture, task, width) for task in picture.tasks]
    hidden = {title for least, titles in _WIDE.items() if width < least for title in titles}
    if len(picture.of("ps")) < 2:
        hidden.add("shards")
    shown = [title for title in rows[0] if title not in hidden]
    for title in shown:
        justify: Literal["left", "right"] = "left" if title in _LEFT else "right"
        table.add_column(title, justify=justify, no_wrap=True)
    for row in rows:
        table.add_row(*(row[title] for title in shown))
    return table


def _cells(picture: JobSnapshot, task: TaskSnapshot, width: int) -> dict[str, RenderableType]:
    """Returns the cells of a task by the titles of their columns."""
    worker, seconds = task.role == "worker", sum(task.phases().values())
    return {
        "task": _text(task.name, "bold"),
        "state": _state(task),
        "step": _whole(task, "global_step"),
        "examples/s": _whole(task, "examples_per_second") if worker else "",
        "ms/step": f"{1000 * seconds:.3g}" if seconds else "",
        "phases": _bar(task, width),
        "staleness": f"{task.number('staleness'):.1f}" if worker else "",
        "lag": str(picture.lag(task)) if worker else "",
        "shards": _text(held(task.status) if task.live else ""),
        "applied": _whole(task, "applied"),
        "stale": _whole(task, "stale"),
        "memory": _size(task, "memory_bytes"),
        "pushed": _size(task, "bytes_pushed"),
        "pulled": _size(task, "bytes_pulled"),
    }


def held(status: Mapping[str, StatusValue]) -> str:
    """Returns the shards of a server, by its status, such as `0 33% (1) [2]`.

    First those that it is primary of, with their share of all parameters; then those that it is
    backup of; then those that it is being filled with.
    """
    primary, share = str(status.get("primary_of", "")), number_of(status, "share")
    parts = [f"{primary} {share:.0%}"] if primary else []
    for name, brackets in (("backup_of", "({})"), ("joining_of", "[{}]")):
        if shards := status.get(name):
            parts.append(brackets.format(shards))
    return " ".join(parts)


def _state(task: TaskSnapshot) -> Text:
    if not task.live:
        return _text(task.state, "dim" if task.state == "left" else "bold red")
    if task.quiet >= SILENT_SECONDS:
        return Text(f"silent {task.quiet:.1f} s", style="bold red")
    return _text(task.state)


def _bar(task: TaskSnapshot, width: int) -> Text:
    """Returns the phases as a bar, with letters that identify them without colours."""
    phases = task.phases()
    if task.role != "worker":
        return Text("apply" if phases else "", style="dim")
    length = 8 if width < 72 else 12 if width < 132 else 24
    bar, edge, total = Text(), 0.0, sum(phases.values())
    for name, seconds in phases.items():
        before = round(edge)
        edge += length * seconds / total
        style = f"{_COLOURS[name]} reverse"
        bar.append(name[0] * (round(edge) - before), style=style)
    return bar


def _legend() -> Text:
    text = Text()
    for name, colour in _COLOURS.items():
        text.append(f" {name[0]} ", style=f"{colour} reverse")
        text.append(f" {SHOWN_PHASES.get(name, name)}  ", style="dim")
    return text


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style)


def _whole(task: TaskSnapshot, name: str) -> str:
    return f"{task.number(name):,.0f}" if name in task.status else ""


def _size(task: TaskSnapshot, name: str) -> str:
    return size(task.number(name)) if name in task.status else ""
