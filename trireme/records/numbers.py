"""Numbers as text, and the numbers of a status."""

from __future__ import annotations

from collections.abc import Mapping

from trireme.cluster.messages import StatusValue


def number(value: float) -> str:
    """Returns a number with three significant digits and separated thousands."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def number_of(status: Mapping[str, StatusValue], name: str) -> float:
    """Returns a number of a status; 0 if it has none of this name."""
    value = status.get(name, 0.0)
    return float(value) if isinstance(value, (int, float)) else 0.0
