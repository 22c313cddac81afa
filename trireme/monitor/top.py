"""Renders the snapshot of a job for a terminal, or as one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trireme.monitor.job_state import SILENT_SECONDS, JobSnapshot, TaskSnapshot, findings
from trireme.monitor.numbers import size

__all__ = ["line", "render"]

_COLOURS = {
    "data": "blue",
    "compute": "green",
    "push": "yellow",
    "wait": "red",
    "apply": "magenta",
}
_LETTERS = {"data": "d", "compute": "c", "push": "p", "wait": "w", "apply": "a"}
_NAMES = {"compute": "forward+backward"}


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
    return "  ".join(parts)


def render(picture: JobSnapshot, width: int) -> RenderableType:
    """Returns a job for a terminal of `width` columns."""
    parts: list[RenderableType] = [_head(picture, width), Text()]
    if picture.tasks:
        parts += [_table(picture, width), Text(), _legend()]
    for text in findings(picture):
        parts.append(Text(f"! {text}", style="bold red"))
    if picture.note:
        parts.append(Text(picture.note, style="dim"))
    return Group(*parts)


def _head(picture: JobSnapshot, width: int) -> RenderableType:
    end = f"/{picture.last_step}" if picture.last_step else ""
    text = Text.assemble(
        (picture.title, "bold"),
        f"  {picture.phase} for {picture.seconds:.1f} s  ",
        f"global step {picture.step}{end}  {picture.pace:,.0f} examples/s",
    )
    if not picture.last_step:
        return text
    bar = ProgressBar(picture.last_step, picture.step, width=min(width, 60))
    return Group(text, bar)


def _table(picture: JobSnapshot, width: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    shown = [column for column in _COLUMNS if width >= column.least]
    for column in shown:
        justify: Literal["left", "right"] = "right" if column.right else "left"
        table.add_column(column.title, justify=justify, no_wrap=True)
    for task in picture.tasks:
        table.add_row(*(column.cell(picture, task, width) for column in shown))
    return table


class _Column(NamedTuple):
    """One column: its title, its cells, and the least width of the terminal that shows it."""

    title: str
    cell: Callable[[JobSnapshot, TaskSnapshot, int], RenderableType]
    least: int = 0
    right: bool = True


def _of_worker(text: Callable[[JobSnapshot, TaskSnapshot], str]) -> Callable[..., RenderableType]:
    return lambda picture, task, width: text(picture, task) if task.role == "worker" else ""


def _milliseconds(picture: JobSnapshot, task: TaskSnapshot, width: int) -> str:
    seconds = sum(task.phases().values())
    return f"{1000 * seconds:.3g}" if seconds else ""


_COLUMNS = (
    _Column("task", lambda _, task, __: Text(task.name, style="bold"), right=False),
    _Column("state", lambda _, task, __: _state(task), right=False),
    _Column("step", lambda _, task, __: _whole(task, "global_step")),
    _Column("examples/s", _of_worker(lambda _, task: _whole(task, "examples_per_second"))),
    _Column("ms/step", _milliseconds),
    _Column("phases", lambda _, task, width: _bar(task, width), right=False),
    _Column("staleness", _of_worker(lambda _, task: f"{task.number('staleness'):.1f}"), 84),
    _Column("lag", _of_worker(lambda picture, task: str(picture.lag(task))), 84),
    _Column("applied", lambda _, task, __: _whole(task, "applied"), 100),
    _Column("stale", lambda _, task, __: _whole(task, "stale"), 100),
    _Column("memory", lambda _, task, __: _size(task, "memory_bytes"), 112),
    _Column("pushed", lambda _, task, __: _size(task, "bytes_pushed"), 132),
    _Column("pulled", lambda _, task, __: _size(task, "bytes_pulled"), 132),
)


def _state(task: TaskSnapshot) -> Text:
    if not task.live:
        return Text(task.state, style="dim" if task.state == "left" else "bold red")
    if task.quiet >= SILENT_SECONDS:
        return Text(f"silent {task.quiet:.1f} s", style="bold red")
    return Text(task.state)


def _bar(task: TaskSnapshot, width: int) -> Text:
    """Returns the phases as a bar, with letters that identify them without colours."""
    phases = task.phases()
    if task.role != "worker":
        return Text("apply" if phases else "", style="dim")
    length = 8 if width < 72 else 12 if width < 120 else 24
    bar, edge, total = Text(), 0.0, sum(phases.values())
    for name, seconds in phases.items():
        before = round(edge)
        edge += length * seconds / total
        style = f"{_COLOURS[name]} reverse"
        bar.append(_LETTERS[name] * (round(edge) - before), style=style)
    return bar


def _legend() -> Text:
    parts = [(f" {_LETTERS[name]} ", f"{colour} reverse") for name, colour in _COLOURS.items()]
    text = Text()
    for part, name in zip(parts, _COLOURS, strict=True):
        text.append(*part)
        text.append(f" {_NAMES.get(name, name)}  ", style="dim")
    return text


def _whole(task: TaskSnapshot, name: str) -> str:
    return f"{task.number(name):,.0f}" if name in task.status else ""


def _size(task: TaskSnapshot, name: str) -> str:
    return size(task.number(name)) if name in task.status else ""
