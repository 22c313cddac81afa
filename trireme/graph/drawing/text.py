"""A picture as text for a terminal, at most 100 characters wide."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from trireme.graph.drawing.picture import OPERATOR, Module, Node, Picture, Totals
from trireme.printable import counted, size

WIDTH = 100  # the width of tables: the longest text of the first column is shortened to fit

_LISTED = 400  # the largest number of operators that are listed one by one; of more, modules are

EACH_TASK = "each task"  # the place of what every task computes for itself


def text(picture: Picture) -> str:
    """Returns the picture in sections: `captured`, `placed`, `cut`, `predicted`."""
    used = {node.place for node in picture.nodes if node.place}
    sections = {
        "captured": _captured(picture),
        "placed": [
            f"{counted(len(picture.operators), 'operator')} on {counted(len(used), 'place')}",
            *_placement_lines(picture, WIDTH - 2),
        ],
        "cut": _cut(picture),
        "predicted": _predicted(picture),
    }
    return "\n\n".join(f"{name}: " + "\n  ".join(lines) for name, lines in sections.items())


def placement_table(picture: Picture) -> str:
    """Returns the table of places: a line for each module, or run of nodes, with costs."""
    return "\n".join(_placement_lines(picture, WIDTH))


def _captured(picture: Picture) -> Iterator[str]:
    yield f"{counted(len(picture.operators), 'operator')} of {picture.model}"
    listed = len(picture.operators) <= _LISTED
    yield from _table(list(_listing(Module.of(picture.operators), 0, listed)), ())


def _listing(module: Module, depth: int, every: bool) -> Iterator[tuple[str, ...]]:
    for item in module.items:
        if isinstance(item, Module):
            yield "  " * depth + item.name, counted(len(item.nodes), "operator")
            if every or not depth:
                yield from _listing(item, depth + 1, every)
        elif every:
            source = item.source.replace("\\", "/").rpartition("/")[2]
            yield "  " * depth + item.name, item.operator, item.shape, source


def _placement_lines(picture: Picture, width: int) -> list[str]:
    head = ("module or operator", "place", "operators", "forward", "backward", "held", "kept")
    rows: list[tuple[str, ...]] = [head]
    listed = [node for node in picture.nodes if node.kind not in ("placeholder", "output")]
    for label, nodes in placement_rows(Module.of(listed)):
        rows.append((label, (*Totals.of(nodes).places, EACH_TASK)[0], *_costs(nodes)))
    if len(rows) > 2:
        rows.append(("all", "", *_costs(listed)))
    note = (
        "milliseconds of one micro-batch; held: parameters, gradients, optimizer state; kept: "
        "from forward to backward"
    )
    return [*_table(rows, (2, 3, 4, 5, 6), width), *textwrap.wrap(note, WIDTH - 2)]


def placement_rows(module: Module) -> Iterator[tuple[str, Sequence[Node]]]:
    """Yields the rows of the placement table: a label and nodes.

    A module whose nodes are in one place is one row, and so are consecutive nodes of a module.
    What each task computes for itself goes with its neighbours.
    """
    run: list[Node] = []
    for item in module.items:
        places = Totals.of(run).places
        beside = isinstance(item, Node) and (not places or item.place in ("", *places))
        if run and not beside:
            yield _label(module.scope, run), run
            run = []
        if isinstance(item, Node):
            run.append(item)
        elif len(Totals.of(item.nodes).places) <= 1:
            yield item.scope, item.nodes
        else:
            yield from placement_rows(item)
    if run:
        yield _label(module.scope, run), run


def _label(scope: str, run: Sequence[Node]) -> str:
    first, last = run[0].name, run[-1].name
    names = first if len(run) == 1 else f"{first} to {last}"
    return f"{scope}: {names}" if scope else names


def _costs(nodes: Sequence[Node]) -> tuple[str, ...]:
    totals = Totals.of(nodes)
    held, kept = size(totals.resident_bytes), size(totals.activation_bytes)
    return f"{totals.operators:,}", *map(milliseconds, totals.seconds), held, kept


def _cut(picture: Picture) -> Iterator[str]:
    placed = {node.name for node in picture.operators if node.place}
    transfers = counted(picture.cut.transfers, "transfer")
    rows: list[tuple[str, ...]] = [("segment", "place", "operators", "from", "to")]
    early = {(each.depth, each.place) for each in picture.cut.segments if not each.part}
    for segment in picture.cut.segments:
        names = [node.name for node in segment.module.graph.nodes if node.op == OPERATOR]
        if found := [name for name in names if name in placed]:
            late = ", late" if segment.part and (segment.depth, segment.place) in early else ""
            name, place = f"depth {segment.depth}{late}", picture.places[segment.place]
            rows.append((name, place, f"{len(found):,}", found[0], found[-1]))
    yield f"{counted(len(rows) - 1, 'segment')}, {transfers} forward for each micro-batch"
    yield from _table(rows, (2,))
    sizes = {node.name: node.cost.output_bytes for node in picture.nodes}
    rows = [("value", "from", "to", "bytes", "gradient")]
    for value, sender, receiver, returns in picture.transfers():
        back = "returns" if returns else "none"
        rows.append((value, sender, receiver, size(sizes[value]), back))
    if len(rows) > 1:
        yield ""
        yield from _table(rows, (3,))


def _predicted(picture: Picture) -> Iterator[str]:
    found, devices = picture.placement, picture.hardware.devices
    step = found.prediction.step_seconds
    pieces = "micro-batch" if picture.micro_batches == 1 else "micro-batches"
    yield f"{duration(step)} a step of {picture.micro_batches} {pieces}"
    rows: list[tuple[str, ...]] = [("place", "busy", "of the step", "peak memory", "limit")]
    for use, device in zip(found.prediction.devices, devices, strict=True):
        limit = "none" if device.memory_bytes is None else size(device.memory_bytes)
        share = use.busy_seconds / step if step else 0.0
        busy, peak = duration(use.busy_seconds), size(use.peak_bytes)
        rows.append((use.device, busy, f"{share:.0%}", peak, limit))
    yield from _table(rows, (1, 2, 3, 4))
    yield f"placed by {found.algorithm}"
    yield ""
    rows = [("algorithm", "step", "against this")]
    ranked = sorted(found.tried.items(), key=lambda each: (each[1] is None, each[1] or 0.0))
    for name, seconds in ranked:
        if seconds is None:
            rows.append((name, "too large", ""))
        else:
            rows.append((name, duration(seconds), f"x {seconds / step if step else 1.0:.2f}"))
    yield from _table(rows, (1, 2))


def _table(
    rows: Sequence[Sequence[str]], numbers: Sequence[int] = (1,), width: int = WIDTH - 2
) -> list[str]:
    """Returns rows with aligned columns, numbers to the right; the widest texts are shortened."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    for column in range(max(map(len, rows), default=0)):
        right = column in numbers
        table.add_column(justify="right" if right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    output = io.StringIO()
    console = Console(file=output, width=width, markup=False, highlight=False, emoji=False)
    console.print(table)
    return [line.rstrip() for line in output.getvalue().splitlines()]


def milliseconds(seconds: float) -> str:
    """Returns a duration in milliseconds with three digits, such as `0.0123` or `1,234`."""
    value = seconds * 1000
    if value == 0:
        return "0"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value >= 0.001 else "<0.001"


def duration(seconds: float) -> str:
    """Returns a duration with its unit, such as `12.3 ms` or `1.5 s`."""
    return f"{milliseconds(seconds)} ms" if seconds < 1 else f"{seconds:,.3g} s"
