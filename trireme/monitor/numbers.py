"""Numbers as text, and the numbers of a status."""

from __future__ import annotations

from collections.abc import Mapping

from trireme.cluster.messages import StatusValue

__all__ = ["number", "number_of", "size"]


def number(value: float) -> str:
    """Returns a number with three significant digits and separated thousands."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def size(nbytes: float) -> str:
    """Returns a number of bytes with its unit, such as `1.5 MiB`."""
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    for unit in ("KiB", "MiB"):
        nbytes /= 1024
        if nbytes < 1024:
            return f"{nbytes:.1f} {unit}"
    return f"{nbytes / 1024:.1f} GiB"


def number_of(status: Mapping[str, StatusValue], name: str) -> float:
    """Returns a number of a status; 0 if it has none of this name."""
    value = status.get(name, 0.0)
    return float(value) if isinstance(value, (int, float)) else 0.0
