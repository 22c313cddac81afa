"""A picture as text for a terminal, at most 100 characters wide."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence

from trireme.graph.drawing.modules import Module, Totals, module_tree, placement_rows, segments
from trireme.graph.drawing.picture import Picture
from trireme.graph.drawing.words import count, duration, milliseconds, size

WIDTH = 100
"""The width of tables: the longest text of the first column is shortened to fit."""

_LISTED = 400  # the largest number of operators that are listed one by one; of more, modules are
_OUTLINE = 100  # the largest number of modules that are listed in place of operators

EACH_TASK = "each task"
"""The place of what every task computes for itself."""


def text(picture: Picture) -> str:
    """Returns the picture in sections: `captured`, `optimised`, `placed`, `cut`, `predicted`."""
    used = {node.place for node in picture.nodes if node.place}
    sections = {
        "captured": _captured(picture),
        "optimised": _optimised(picture),
        "placed": [
            f"{count(len(picture.operators), 'operator')} on {count(len(used), 'place')}",
            *_placement_lines(picture, WIDTH - 2),
        ],
        "cut": _cut(picture),
        "predicted": _predicted(picture),
    }
    return "\n\n".join(f"{name}: " + "\n  ".join(lines) for name, lines in sections.items())


def placement_table(picture: Picture) -> str:
    """Returns the table of places: a line for each module, or run of nodes, with costs.

    Durations are for one micro-batch, in milliseconds. Columns are aligned; no line is longer than
    100 characters.
    """
    return "\n".join(_placement_lines(picture, WIDTH))


def _captured(picture: Picture) -> Iterator[str]:
    yield f"{count(len(picture.captured), 'operator')} of {picture.model}"
    tree = module_tree(picture.captured)
    if len(picture.captured) <= _LISTED:
        yield from _table(list(_listing(tree, 0)), ())
        return
    outlines = [list(_outline(tree, depth)) for depth in range(1, 20)]
    short = [rows for rows in outlines if len(rows) <= _OUTLINE]
    yield from _table((short or outlines[:1])[-1], (1,))


def _listing(module: Module, depth: int) -> Iterator[tuple[str, ...]]:
    for item in module.items:
        if isinstance(item, Module):
            yield ("  " * depth + item.name,)
            yield from _listing(item, depth + 1)
        else:
            source = item.source.replace("\\", "/").rpartition("/")[2]
            yield "  " * depth + item.name, item.operator, item.shape, source


def _outline(module: Module, depth: int) -> Iterator[tuple[str, str]]:
    for item in module.modules if depth else ():
        indent = "  " * item.scope.count(".")
        yield indent + item.name, count(item.totals.operators, "operator")
        yield from _outline(item, depth - 1)


def _optimised(picture: Picture) -> Iterator[str]:
    yield f"{picture.passes[0].before} -> {count(picture.passes[-1].after, 'operator')}"
    yield from _table([(each.name, f"{each.before} -> {each.after}") for each in picture.passes])
    gone = Counter(node.operator for node in picture.removed)
    if gone:
        names = [name if number == 1 else f"{number} {name}" for name, number in gone.items()]
        yield from textwrap.wrap("without " + ", ".join(names), WIDTH - 2)


def _placement_lines(picture: Picture, width: int) -> list[str]:
    head = ("module or operator", "place", "operators", "forward", "backward", "held", "kept")
    rows: list[tuple[str, ...]] = [head]
    for label, nodes in placement_rows(module_tree(picture.listed)):
        totals = Totals.of(nodes)
        rows.append((label, (*totals.places, EACH_TASK)[0], *_costs(totals)))
    if len(rows) > 2:
        rows.append(("all", "", *_costs(Totals.of(picture.listed))))
    note = (
        "milliseconds of one micro-batch; held: parameters, gradients, optimizer state; kept: "
        "from forward to backward"
    )
    return [*_table(rows, (2, 3, 4, 5, 6), width), *textwrap.wrap(note, WIDTH - 2)]


def _costs(totals: Totals) -> tuple[str, ...]:
    return (
        f"{totals.operators:,}",
        milliseconds(totals.forward_seconds),
        milliseconds(totals.backward_seconds),
        size(totals.resident_bytes),
        size(totals.activation_bytes),
    )


def _cut(picture: Picture) -> Iterator[str]:
    found = segments(picture.nodes)
    transfers = count(len(picture.transfers), "transfer")
    yield f"{count(len(found), 'segment')}, {transfers} forward for each micro-batch"
    rows: list[tuple[str, ...]] = [("segment", "place", "operators", "from", "to")]
    for depth, place, nodes in found:
        number = f"{sum(node.is_operator for node in nodes):,}"
        rows.append((f"depth {depth}", place, number, nodes[0].name, nodes[-1].name))
    yield from _table(rows, (2,))
    if picture.transfers:
        rows = [("value", "from", "to", "bytes", "gradient")]
        for each in picture.transfers:
            back = "returns" if each.returns else "none"
            rows.append((each.value, each.sender, each.receiver, size(each.bytes), back))
        yield ""
        yield from _table(rows, (3,))


def _predicted(picture: Picture) -> Iterator[str]:
    of = count(picture.micro_batches, "micro-batch", "es")
    yield f"{duration(picture.step_seconds)} a step of {of}"
    rows: list[tuple[str, ...]] = [("place", "busy", "of the step", "peak memory", "limit")]
    for use in picture.uses:
        share = use.busy_seconds / picture.step_seconds if picture.step_seconds else 0.0
        limit = "none" if use.limit_bytes is None else size(use.limit_bytes)
        busy = duration(use.busy_seconds)
        rows.append((use.name, busy, f"{share:.0%}", size(use.peak_bytes), limit))
    yield from _table(rows, (1, 2, 3, 4))
    yield from textwrap.wrap(f"placed by {picture.reason}", WIDTH - 2)
    yield ""
    yield from _table([("algorithm", "step", "against this"), *tried_rows(picture)], (1, 2))


def tried_rows(picture: Picture) -> Iterator[tuple[str, str, str]]:
    """Yields each algorithm with its step and that step against the chosen one, fastest first."""
    ranked = sorted(picture.tried.items(), key=lambda each: (each[1] is None, each[1] or 0.0))
    for name, seconds in ranked:
        if seconds is None:
            yield name, "too large", ""
        else:
            ratio = seconds / picture.step_seconds if picture.step_seconds else 1.0
            yield name, duration(seconds), f"x {ratio:.2f}"


def _table(
    rows: Sequence[Sequence[str]], numbers: Sequence[int] = (1,), width: int = WIDTH - 2
) -> list[str]:
    """Returns rows with aligned columns, numbers to the right; the widest texts are shortened."""
    columns = range(max(map(len, rows), default=0))
    full = [[*row, *[""] * (len(columns) - len(row))] for row in rows]
    widths = [max(len(row[i]) for row in full) for i in columns]
    texts = [i for i in columns if i not in numbers]
    while sum(widths) + 2 * (len(columns) - 1) > width:
        widest = max(texts, key=widths.__getitem__)
        if widths[widest] <= 12:
            break
        widths[widest] -= 1
    lines = []
    for row in full:
        cells = [_cell(row[i], widths[i], i in numbers) for i in columns]
        lines.append("  ".join(cells).rstrip())
    return lines


def _cell(words: str, width: int, number: bool) -> str:
    if len(words) > width:
        kept = width - 3
        words = f"{words[: kept // 2]}...{words[len(words) - (kept - kept // 2) :]}"
    return words.rjust(width) if number else words.ljust(width)
