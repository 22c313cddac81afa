"""Charts as inline SVG, drawn by the macros of `charts.html.jinja`. Colours are the page's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from trireme.dashboards.totals import Points
from trireme.records.numbers import number

if TYPE_CHECKING:
    from jinja2 import Template

_LOG_SPAN = 100.0


@cache
def template(name: str) -> Template:
    """Returns a template of this package, by the name of its file."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("trireme.dashboards", "")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined).get_template(name)


def _macros() -> Any:
    return template("charts.html.jinja").module


def line_chart(
    series: Mapping[str, Points],
    x_label: str,
    y_label: str,
    *,
    from_zero: bool = False,
    may_be_log: bool = True,
) -> str:
    """Returns curves over a common axis.

    The vertical axis is logarithmic where all values are above 0 and span two orders, unless it may
    not be. None of `series` may be empty.
    """
    values = [value for points in series.values() for _, value in points]
    low, high = min(values) if not from_zero else 0.0, max(values)
    log = may_be_log and low > 0 and high / low > _LOG_SPAN
    up = _Scale(low, high, log)
    steps = [step for points in series.values() for step, _ in points]
    across = _Scale(min(steps), max(steps))
    curves = {
        name: [(across.place(step), up.place(value)) for step, value in thinned(points)]
        for name, points in series.items()
    }
    kind = f"{y_label}{', logarithmic' if log else ''} over {x_label}"
    return str(_macros().line_chart(kind, x_label, up.ticks, across.ticks, curves))


def stacked_bars(
    rows: Mapping[str, Mapping[str, float]], unit: str, colours: Mapping[str, int]
) -> str:
    """Returns one bar for each row, made of named parts, on a common scale."""
    longest = max((sum(parts.values()) for parts in rows.values()), default=0.0) or 1.0
    names = {name: colours[name] for parts in rows.values() for name in parts}
    sized = [
        (
            row,
            [(name, number(size), size / longest) for name, size in parts.items()],
            number(sum(parts.values())),
        )
        for row, parts in rows.items()
    ]
    return str(_macros().stacked_bars(sized, unit, names))


class _Scale:
    """Maps values to places on an axis, with ticks (place, label) at round numbers."""

    def __init__(self, low: float, high: float, log: bool = False) -> None:
        self._log = log
        if log:
            self._low, self._high = math.log10(low), math.log10(high)
            first, last = math.floor(self._low), math.ceil(self._high)
            every = max(1, math.ceil((last - first) / 5))
            round_values = [
                10.0**power
                for power in range(first, last + 1, every)
                if self._low - 1e-9 <= power <= self._high + 1e-9
            ]
        else:
            if high - low < 1e-12 * max(abs(high), 1.0):
                low, high = min(0.0, 2 * low), max(0.0, 2 * high) or 1.0
            self._low, self._high = low, high
            rough = (high - low) / 4
            power = 10.0 ** math.floor(math.log10(rough))
            steps = (power * nice for nice in (1, 2, 2.5, 5, 10))
            step = next(step for step in steps if step >= rough * 0.999)
            first, last = math.ceil(low / step - 1e-9), int(high / step + 1e-9)
            round_values = [count * step for count in range(first, last + 1)]
        self.ticks = [(self.place(value), _tick(value)) for value in round_values]

    def place(self, value: float) -> float:
        """Returns the place of a value: 0 at the low end, 1 at the high end."""
        at = math.log10(value) if self._log else value
        return (at - self._low) / ((self._high - self._low) or 1.0)


def _tick(value: float) -> str:
    if abs(value) >= 10_000:
        thousands = value / 1000
        return f"{thousands / 1000:g}M" if abs(thousands) >= 1000 else f"{thousands:g}k"
    if value == 0 or abs(value) >= 1e-2:
        return f"{value:.10g}"
    digits, _, power = f"{value:.2e}".partition("e")
    return f"{float(digits):g}e{int(power)}"


def thinned(points: Points, most: int = 400) -> Points:
    """Returns about `most` of the points at most: the lowest and the highest of each stretch."""
    if len(points) <= most:
        return points
    kept: list[tuple[float, float]] = []
    length = math.ceil(2 * len(points) / most)
    for start in range(0, len(points), length):
        stretch = points[start : start + length]
        kept += sorted({min(stretch, key=itemgetter(1)), max(stretch, key=itemgetter(1))})
    return kept
