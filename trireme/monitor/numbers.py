"""Numbers as text, and the numbers of a status."""

from __future__ import annotations

from collections.abc import Mapping

from rich.filesize import pick_unit_and_suffix

from trireme.cluster.messages import StatusValue


def number(value: float) -> str:
    """Returns a number with three significant digits and separated thousands."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def size(nbytes: float) -> str:
    """Returns a number of bytes with its unit, such as `1.5 MiB`."""
    unit, name = pick_unit_and_suffix(int(nbytes), ["B", "KiB", "MiB", "GiB"], 1024)
    return f"{nbytes / unit:.{0 if unit == 1 else 1}f} {name}"


def number_of(status: Mapping[str, StatusValue], name: str) -> float:
    """Returns a number of a status; 0 if it has none of this name."""
    value = status.get(name, 0.0)
    return float(value) if isinstance(value, (int, float)) else 0.0
