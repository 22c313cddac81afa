"""A picture of a job on a terminal, and in one line where there is none."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trireme.monitor.picture import SILENT_SECONDS, Picture, TaskPicture, findings

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
_NARROW, _WIDE = 90, 130


def line(picture: Picture) -> str:
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


def render(picture: Picture, width: int) -> RenderableType:
    """Returns a job for a terminal of so many columns."""
    parts: list[RenderableType] = [_head(picture, width), Text()]
    if picture.tasks:
        parts += [_table(picture, width), Text(), _legend()]
    for text in findings(picture):
        parts.append(Text(f"! {text}", style="bold red"))
    if picture.note:
        parts.append(Text(picture.note, style="dim"))
    return Group(*parts)


def _head(picture: Picture, width: int) -> RenderableType:
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


def _table(picture: Picture, width: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    roomy, wide = width >= _NARROW, width >= _WIDE
    table.add_column("task", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for name in ("step", "examples/s", "ms/step"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("phases", no_wrap=True)
    table.add_column("staleness" if wide else "stal", justify="right", no_wrap=True)
    table.add_column("lag", justify="right", no_wrap=True)
    if roomy:
        table.add_column("applied", justify="right", no_wrap=True)
        table.add_column("stale", justify="right", no_wrap=True)
        table.add_column("memory", justify="right", no_wrap=True)
    if wide:
        table.add_column("sent", justify="right", no_wrap=True)
        table.add_column("received", justify="right", no_wrap=True)
    for task in picture.tasks:
        cells = [*_cells(picture, task, 24 if roomy else 12)]
        if roomy:
            cells += [_whole(task, "applied"), _whole(task, "stale"), _size(task, "memory_bytes")]
        if wide:
            cells += [_size(task, "bytes_sent"), _size(task, "bytes_received")]
        table.add_row(*cells)
    return table


def _cells(picture: Picture, task: TaskPicture, width: int) -> list[RenderableType]:
    worker = task.role == "worker"
    phases = task.phases()
    seconds = sum(phases.values())
    pace = task.number("examples_per_second")
    return [
        Text(task.name, style="bold"),
        _state(task),
        _whole(task, "global_step"),
        f"{pace:,.0f}" if worker else "",
        f"{1000 * seconds:.3g}" if seconds else "",
        _bar(phases, width if worker else 0),
        f"{task.number('staleness'):.1f}" if worker else "",
        str(picture.lag(task)) if worker else "",
    ]


def _state(task: TaskPicture) -> Text:
    if not task.live:
        return Text(task.state, style="dim" if task.state == "left" else "bold red")
    if task.quiet >= SILENT_SECONDS:
        return Text(f"silent {task.quiet:.1f} s", style="bold red")
    return Text(task.state)


def _bar(phases: dict[str, float], width: int) -> Text:
    """Returns the shares of the phases as a bar; the letters say which without the colours."""
    total = sum(phases.values())
    bar = Text()
    if not width:
        return Text("apply" if phases else "", style="dim")
    edge = taken = 0.0
    for name, seconds in phases.items():
        edge += width * seconds / total
        length = round(edge) - int(taken)
        taken = round(edge)
        bar.append(_LETTERS[name] * length, style=f"{_COLOURS[name]} reverse")
    return bar


def _legend() -> Text:
    parts = [(f" {_LETTERS[name]} ", f"{colour} reverse") for name, colour in _COLOURS.items()]
    text = Text()
    for part, name in zip(parts, _COLOURS, strict=True):
        text.append(*part)
        text.append(f" {_NAMES.get(name, name)}  ", style="dim")
    return text


def _whole(task: TaskPicture, name: str) -> str:
    return f"{task.number(name):,.0f}" if name in task.status else ""


def _size(task: TaskPicture, name: str) -> str:
    if name not in task.status:
        return ""
    size = task.number(name)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
