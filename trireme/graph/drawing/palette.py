"""The colours of places, those of the pages of `trireme report`."""

from __future__ import annotations

from collections.abc import Sequence

COLOURS = ("#2563eb", "#d9480f", "#2b8a3e", "#9c36b5", "#0b7285", "#a68a00")
"""The colours on a light page, one for each place in turn."""

DARK_COLOURS = ("#7aa7ff", "#ff9d66", "#69d083", "#d79be8", "#5ccbdc", "#e3c64b")
"""The same for a dark page."""

TINTS = ("#dbe6fd", "#fbe0d4", "#d9ecdc", "#f0dff5", "#d5e8ec", "#f2ecd0")
"""Light fills of these colours, on which text can be read."""

NEITHER = "#eeeeee"
"""The fill of what is in no place, or in several."""


def colour_number(place: str, places: Sequence[str]) -> int | None:
    """Returns the number of a place's colour; None for no place."""
    return places.index(place) % len(COLOURS) if place in places else None
