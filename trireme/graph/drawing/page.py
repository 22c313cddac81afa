"""A picture as one self-contained page of HTML, which folds by modules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from trireme.graph.drawing.modules import Totals, module_tree, segments
from trireme.graph.drawing.palette import COLOURS, DARK_COLOURS, colour_number
from trireme.graph.drawing.picture import Picture, PlaceUse
from trireme.graph.drawing.quantities import duration, milliseconds, size
from trireme.graph.drawing.text import tried_rows

_OPEN = 60  # modules at the top are open where the model has at most so many operators

_FITS = 1500.0  # the largest width of a drawing that is shrunk to the page, in points


def page(picture: Picture, drawing: str = "") -> str:
    """Returns the page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("trireme.graph.drawing", package_path="")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    places = picture.place_names
    longest = max((use.peak_bytes for use in picture.places), default=0)
    return environment.get_template("page.html.jinja").render(
        title=f"The graph of {picture.model}" if picture.model else "The graph of the model",
        reason=picture.reason,
        facts=list(_facts(picture)),
        light=COLOURS,
        dark=DARK_COLOURS,
        colours={place: colour_number(place, places) for place in places},
        costed=picture.costed,
        tree=module_tree(picture.listed),
        open_depth=1 if len(picture.operators) <= _OPEN else 0,
        uses=[_use(use, picture.step_seconds or 0.0, longest) for use in picture.places],
        transfers=[
            (
                each.value,
                each.sender,
                each.receiver,
                "returns" if each.returns else "none",
                size(each.bytes),
            )
            for each in picture.transfers
        ],
        segments=[
            (
                depth,
                place,
                nodes[0].name,
                nodes[-1].name,
                f"{Totals.of(nodes).operators:,}",
            )
            for (depth, place), nodes in segments(picture.nodes)
        ],
        tried=list(tried_rows(picture)),
        passes=[(each.name, f"{each.before:,}", f"{each.after:,}") for each in picture.passes],
        removed=picture.removed,
        drawing=drawing,
        fits=_width(drawing) <= _FITS,
        ms=milliseconds,
        size=size,
        totals_of=Totals.of,
    )


def _facts(picture: Picture) -> Iterator[tuple[str, str]]:
    if picture.step_seconds is not None:
        yield "predicted step", duration(picture.step_seconds)
        yield "micro-batches", f"{picture.micro_batches:,}"
    if picture.passes:
        yield "captured operators", f"{picture.passes[0].before:,}"
    yield "operators", f"{len(picture.operators):,}"
    if picture.placed:
        yield "places", f"{len({node.place for node in picture.nodes if node.place}):,}"
    if picture.cut or picture.transfers:
        yield "transfers", f"{len(picture.transfers):,}"
        yield "bytes forward", size(sum(each.bytes for each in picture.transfers))


@dataclass(frozen=True, slots=True)
class _Use:
    name: str
    busy: str
    busy_percent: str
    memory: str
    memory_percent: str


def _use(use: PlaceUse, step_seconds: float, longest: int) -> _Use:
    share = use.busy_seconds / step_seconds if step_seconds else 0.0
    of = f" of {size(use.limit_bytes)}" if use.limit_bytes is not None else ""
    whole = use.limit_bytes or longest or 1
    return _Use(
        use.name,
        f"{duration(use.busy_seconds)}, {share:.0%}",
        f"{min(share, 1.0) * 100:.1f}",
        f"{size(use.peak_bytes)}{of}",
        f"{min(use.peak_bytes / whole, 1.0) * 100:.1f}",
    )


def _width(drawing: str) -> float:
    """Returns the width of an `<svg>` element in points; 0 if it has none."""
    match = re.search(r'<svg width="([0-9.]+)pt"', drawing)
    return float(match[1]) if match else 0.0
