"""A picture as one self-contained page of HTML, which folds by modules."""

from __future__ import annotations

import re
from typing import Any

from trireme.graph.drawing.modules import Totals, module_tree, segments
from trireme.graph.drawing.picture import DeviceUse, Picture
from trireme.graph.drawing.svg import COLOURS, DARK_COLOURS, colour_number
from trireme.graph.drawing.text import tried_rows
from trireme.graph.drawing.words import duration, milliseconds, size

_OPEN = 60  # modules at the top are open where the model has at most so many operators

_FITS = 1500.0  # the largest width of a drawing that is shrunk to the page, in points


def page(picture: Picture, drawing: str = "") -> str:
    """Returns the page, with an `<svg>` element in it if one is given."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("trireme.graph.drawing", package_path="")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    places, passes = picture.places, picture.passes
    longest = max((use.peak_bytes for use in picture.uses), default=0)
    width = re.search(r'<svg width="([0-9.]+)pt"', drawing)
    return environment.get_template("page.html.jinja").render(
        title=f"The graph of {picture.model}",
        reason=picture.reason,
        facts=[
            ("predicted step", duration(picture.step_seconds)),
            ("micro-batches", f"{picture.micro_batches:,}"),
            ("captured operators", f"{len(picture.captured):,}"),
            ("operators", f"{len(picture.operators):,}"),
            ("places", f"{len({node.place for node in picture.nodes if node.place}):,}"),
            ("transfers", f"{len(picture.transfers):,}"),
            ("bytes forward", size(sum(each.bytes for each in picture.transfers))),
        ],
        light=COLOURS,
        dark=DARK_COLOURS,
        colours={place: colour_number(place, places) for place in places},
        tree=module_tree(picture.listed),
        open_depth=1 if len(picture.operators) <= _OPEN else 0,
        uses=[_shown_use(use, picture.step_seconds, longest) for use in picture.uses],
        transfers=[
            (it.value, it.sender, it.receiver, "returns" if it.returns else "none", size(it.bytes))
            for it in picture.transfers
        ],
        segments=[
            (depth, place, nodes[0].name, nodes[-1].name, f"{Totals.of(nodes).operators:,}")
            for depth, place, nodes in segments(picture.nodes)
        ],
        tried=list(tried_rows(picture)),
        passes=[(each.name, f"{each.before:,}", f"{each.after:,}") for each in passes],
        removed=picture.removed,
        drawing=drawing,
        fits=width is None or float(width[1]) <= _FITS,
        ms=milliseconds,
        size=size,
        totals_of=Totals.of,
    )


def _shown_use(use: DeviceUse, step_seconds: float, longest: int) -> dict[str, Any]:
    share = use.busy_seconds / step_seconds if step_seconds else 0.0
    of = f" of {size(use.limit_bytes)}" if use.limit_bytes is not None else ""
    whole = use.limit_bytes or longest or 1
    return {
        "name": use.name,
        "busy": f"{duration(use.busy_seconds)}, {share:.0%}",
        "busy_percent": f"{min(share, 1.0) * 100:.1f}",
        "memory": f"{size(use.peak_bytes)}{of}",
        "memory_percent": f"{min(use.peak_bytes / whole, 1.0) * 100:.1f}",
    }
