"""A picture as text for a terminal, at most 100 characters wide."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from trireme.graph.drawing.modules import Module, Totals, module_tree, placement_rows, segments
from trireme.graph.drawing.picture import Picture
from trireme.graph.drawing.quantities import count, duration, milliseconds, size

WIDTH = 100
"""The width of tables: the longest text of the first column is shortened to fit."""

LISTED = 400
"""The largest number of operators that are listed one by one; of more, modules are."""

_OUTLINE = 100  # the largest number of modules that are listed in place of operators

EACH_TASK = "each task"
"""The place of what every task computes for itself."""


def text(picture: Picture) -> str:
    """Returns the picture in sections: `captured`, `optimised`, `placed`, `cut`, `predicted`.

    A section is left out where the picture has nothing of it.
    """
    sections = [
        ("captured", _captured(picture)),
        ("optimised", _optimised(picture)),
        ("placed", _placed(picture)),
        ("cut", _cut(picture)),
        ("predicted", _predicted(picture)),
    ]
    parts = []
    for name, lines in sections:
        body = list(lines)
        if body:
            parts.append("\n".join([f"{name}: {body[0]}", *(f"  {line}" for line in body[1:])]))
    return "\n\n".join(parts)


def placement_table(picture: Picture) -> str:
    """Returns the table of places: a line for each module, or run of nodes, with costs.

    Durations are for one micro-batch, in milliseconds. Columns are aligned; no line is longer than
    100 characters.
    """
    return "\n".join(_placement_lines(picture, WIDTH))


# The sections -----------------------------------------------------------------------------------


def _captured(picture: Picture) -> Iterator[str]:
    if not picture.captured:
        return
    named = f" of {picture.model}" if picture.model else ""
    yield count(len(picture.captured), "operator") + named
    tree = module_tree(picture.captured)
    if len(picture.captured) <= LISTED:
        yield from _table(list(_listing(tree, 0)), (), WIDTH - 2)
    else:
        yield from _table(_modules(tree), (1,), WIDTH - 2)


def _listing(module: Module, depth: int) -> Iterator[tuple[str, ...]]:
    """Yields a row for each operator below the row of its module."""
    for item in module.items:
        if isinstance(item, Module):
            yield ("  " * depth + item.name,)
            yield from _listing(item, depth + 1)
        else:
            source = item.source.replace("\\", "/").rpartition("/")[2]
            yield "  " * depth + item.name, item.operator, item.shape, source


def _modules(tree: Module) -> list[tuple[str, str]]:
    """Returns a row for each module, as deep as few rows allow."""
    rows: list[tuple[str, str]] = []
    for depth in range(1, 20):
        deeper = list(_outline(tree, depth))
        if rows and len(deeper) > _OUTLINE:
            break
        rows = deeper
    return rows


def _outline(module: Module, depth: int) -> Iterator[tuple[str, str]]:
    for item in module.items:
        if isinstance(item, Module):
            indent = "  " * item.scope.count(".")
            yield indent + item.name, count(item.totals.operators, "operator")
            if depth > 1:
                yield from _outline(item, depth - 1)


def _optimised(picture: Picture) -> Iterator[str]:
    if not picture.passes:
        return
    yield f"{picture.passes[0].before} -> {count(picture.passes[-1].after, 'operator')}"
    yield from _table(
        [(each.name, f"{each.before} -> {each.after}") for each in picture.passes], (1,), WIDTH - 2
    )
    gone = Counter(node.operator for node in picture.removed)
    if gone:
        names = [name if number == 1 else f"{number} {name}" for name, number in gone.items()]
        yield from _wrapped("without " + ", ".join(names))


def _placed(picture: Picture) -> Iterator[str]:
    if not picture.placed:
        return
    used = dict.fromkeys(node.place for node in picture.nodes if node.place)
    yield f"{count(len(picture.operators), 'operator')} on {count(len(used), 'place')}"
    yield from _placement_lines(picture, WIDTH - 2)


def _placement_lines(picture: Picture, width: int) -> list[str]:
    head = ("module or operator", "place", "operators", "forward", "backward", "held", "kept")
    rows: list[tuple[str, ...]] = [head]
    for row in placement_rows(module_tree(picture.listed)):
        place = (*row.totals.places, EACH_TASK)[0] if picture.placed else ""
        rows.append((row.label, place, *_costs(row.totals, picture.costed)))
    if len(rows) > 2:
        rows.append(("all", "", *_costs(Totals.of(picture.listed), picture.costed)))
    lines = _table(rows, (2, 3, 4, 5, 6), width)
    if picture.costed:
        lines += _wrapped(
            "milliseconds of one micro-batch; held: parameters, gradients, optimizer state; kept: "
            "from forward to backward"
        )
    return lines


def _costs(totals: Totals, costed: bool) -> tuple[str, ...]:
    if not costed:
        return (f"{totals.operators:,}", "", "", "", "")
    return (
        f"{totals.operators:,}",
        milliseconds(totals.forward_seconds),
        milliseconds(totals.backward_seconds),
        size(totals.resident_bytes),
        size(totals.activation_bytes),
    )


def _cut(picture: Picture) -> Iterator[str]:
    if not picture.cut:
        return
    found = segments(picture.nodes)
    yield (
        f"{count(len(found), 'segment')}, {count(len(picture.transfers), 'transfer')} forward "
        "for each micro-batch"
    )
    rows: list[tuple[str, ...]] = [("segment", "place", "operators", "from", "to")]
    for (depth, place), nodes in found:
        number = f"{sum(node.is_operator for node in nodes):,}"
        rows.append((f"depth {depth}", place, number, nodes[0].name, nodes[-1].name))
    yield from _table(rows, (2,), WIDTH - 2)
    if picture.transfers:
        rows = [("value", "from", "to", "bytes", "gradient")]
        for each in picture.transfers:
            back = "returns" if each.returns else "none"
            rows.append((each.value, each.sender, each.receiver, size(each.bytes), back))
        yield ""
        yield from _table(rows, (3,), WIDTH - 2)


def _predicted(picture: Picture) -> Iterator[str]:
    if picture.step_seconds is None:
        return
    of = count(picture.micro_batches, "micro-batch", "es")
    yield f"{duration(picture.step_seconds)} a step of {of}"
    rows: list[tuple[str, ...]] = [("place", "busy", "of the step", "peak memory", "limit")]
    for place in picture.places:
        share = place.busy_seconds / picture.step_seconds if picture.step_seconds else 0.0
        limit = "none" if place.limit_bytes is None else size(place.limit_bytes)
        busy = duration(place.busy_seconds)
        rows.append((place.name, busy, f"{share:.0%}", size(place.peak_bytes), limit))
    yield from _table(rows, (1, 2, 3, 4), WIDTH - 2)
    if picture.reason:
        yield from _wrapped(f"placed by {picture.reason}")
    if picture.tried:
        yield ""
        rows = [("algorithm", "step", "against this")]
        rows += tried_rows(picture)
        yield from _table(rows, (1, 2), WIDTH - 2)


def tried_rows(picture: Picture) -> Iterator[tuple[str, str, str]]:
    """Yields each algorithm with its step and that step against the chosen one, fastest first."""
    ranked = sorted(picture.tried.items(), key=lambda each: (each[1] is None, each[1] or 0.0))
    for name, seconds in ranked:
        if seconds is None:
            yield name, "too large", ""
        else:
            ratio = seconds / picture.step_seconds if picture.step_seconds else 1.0
            yield name, duration(seconds), f"x {ratio:.2f}"


# Tables -----------------------------------------------------------------------------------------


def _table(rows: Sequence[Sequence[str]], numbers: Sequence[int], width: int) -> list[str]:
    """Returns rows with aligned columns, numbers to the right.

    Columns without any text are left out. The widest columns of text are shortened until all fit.
    """
    wide = max((len(row) for row in rows), default=0)
    full = [[*row, *[""] * (wide - len(row))] for row in rows]
    body = full[1:] if len(full) > 1 else full
    columns = [i for i in range(wide) if any(row[i] for row in body)]
    widths = {i: max(len(row[i]) for row in full) for i in columns}
    texts = [i for i in columns if i not in numbers]
    while texts and sum(widths.values()) + 2 * (len(columns) - 1) > width:
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


def _wrapped(words: str) -> list[str]:
    """Returns a sentence as lines that fit."""
    lines = [""]
    for word in words.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > WIDTH - 2:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return lines
