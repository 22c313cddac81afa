"""Charts as inline SVG: pure functions from numbers to text. Colours are the page's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise

from trireme.monitor.curves import Points, smoothed, thinned
from trireme.monitor.numbers import number

__all__ = ["bar_chart", "line_chart", "stacked_bars"]

_WIDTH, _HEIGHT = 380, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 18, 10, 34
_WIDEST_BAR = 44.0
_LETTER = 6.2  # how wide one is, about
_NOISE = 0.2
_MOST_POINTS = 400
_SMOOTH_FROM = 40
_COLOURS = 6
_LOG_SPAN = 100.0


def line_chart(
    series: Mapping[str, Points],
    x_label: str,
    y_label: str,
    *,
    from_zero: bool = False,
    may_be_log: bool = True,
) -> str:
    """Returns curves over a common axis; noisy ones also as their moving mean.

    The vertical axis is logarithmic where all values are above 0 and span two orders, unless it
    may not be.

    Args:
        series: the points of each curve by its name; none may be empty.
        x_label: the name of the horizontal axis.
        y_label: the name of the vertical axis, for screen readers.
        from_zero: whether the vertical axis begins at 0.
        may_be_log: whether it may be logarithmic.
    """
    values = [value for points in series.values() for _, value in points]
    low, high = min(values) if not from_zero else 0.0, max(values)
    log = may_be_log and low > 0 and high / low > _LOG_SPAN
    scale = _Scale(low, high, log)
    steps = [step for points in series.values() for step, _ in points]
    across = _Scale(min(steps), max(steps))
    parts = [*_grid(across, scale, x_label)]
    for position, points in enumerate(series.values()):
        colour = f"s{position % _COLOURS}"
        noisy = len(points) >= _SMOOTH_FROM and _is_noisy(points)
        drawn = _path(thinned(points, _MOST_POINTS), across, scale)
        parts.append(f'<path class="line {colour}{" faint" if noisy else ""}" d="{drawn}"/>')
        if noisy:
            mean = _path(thinned(smoothed(points), _MOST_POINTS), across, scale)
            parts.append(f'<path class="line {colour}" d="{mean}"/>')
        elif len(points) <= 3:
            parts += [
                f'<circle class="dot {colour}" cx="{_x(across, x):.1f}" cy="{_y(scale, y):.1f}" '
                'r="3"/>'
                for x, y in points
            ]
    kind = f"{y_label}{', logarithmic' if log else ''} over {x_label}"
    return _svg(kind, parts) + _key(list(series))


def bar_chart(bars: Sequence[tuple[str, float]], x_label: str, y_label: str) -> str:
    """Returns a bar chart of pairs (name, count)."""
    scale = _Scale(0.0, max((count for _, count in bars), default=1.0) or 1.0)
    width = min((_WIDTH - _LEFT - _RIGHT) / max(len(bars), 1), _WIDEST_BAR)
    parts = [*_rules(scale), _text(_middle(), _HEIGHT - 4, x_label, "mid")]
    taken = 0.0
    for position, (name, count) in enumerate(bars):
        x, y = _LEFT + position * width, _y(scale, count)
        height = _HEIGHT - _BOTTOM - y
        parts.append(
            f'<rect class="fill s0" x="{x + 1:.1f}" y="{y:.1f}" width="{max(width - 2, 1):.1f}" '
            f'height="{height:.1f}"><title>{escape(name)}: {number(count)}</title></rect>'
        )
        half = _LETTER * len(name) / 2
        if x + width / 2 - half >= taken:  # else the labels would overlap
            parts.append(_text(x + width / 2, _HEIGHT - _BOTTOM + 13, name, "mid"))
            taken = x + width / 2 + half + _LETTER / 2
    return _svg(f"{y_label} by {x_label}", parts)


def stacked_bars(
    rows: Mapping[str, Mapping[str, float]], unit: str, colours: Mapping[str, int]
) -> str:
    """Returns one bar for each row, made of named parts, on a common scale.

    Args:
        rows: the parts' sizes by the row's name, in the same order in each row.
        unit: of the sizes.
        colours: the number of each part's colour by its name.
    """
    longest = max((sum(parts.values()) for parts in rows.values()), default=0.0) or 1.0
    names = list(dict.fromkeys(name for parts in rows.values() for name in parts))
    lines = []
    for row, parts in rows.items():
        pieces = "".join(
            f'<span class="b{colours[name]}" '
            f'style="width:{100 * size / longest:.2f}%" '
            f'title="{escape(name)} {number(size)} {escape(unit)}"></span>'
            for name, size in parts.items()
        )
        total = f"{number(sum(parts.values()))} {escape(unit)}"
        lines.append(
            f'<div class="row"><b>{escape(row)}</b><div class="bar">{pieces}</div>'
            f"<i>{total}</i></div>"
        )
    return "".join(lines) + _key(names, [colours[name] for name in names])


def _is_noisy(points: Points) -> bool:
    """Whether a curve changes its direction at every few points."""
    rises = [after[1] > before[1] for before, after in pairwise(points)]
    turns = sum(before != after for before, after in pairwise(rises))
    return turns > _NOISE * len(points)


class _Scale:
    """Maps values to positions on an axis, with ticks at round numbers."""

    def __init__(self, low: float, high: float, log: bool = False) -> None:
        self.log = log
        if log:
            self.low, self.high = math.log10(low), math.log10(high)
            first, last = math.floor(self.low), math.ceil(self.high)
            every = max(1, math.ceil((last - first) / 5))
            self.ticks = [
                10.0**power
                for power in range(first, last + 1, every)
                if self.low - 1e-9 <= power <= self.high + 1e-9
            ]
            return
        if high - low < 1e-12 * max(abs(high), 1.0):
            low, high = min(0.0, 2 * low), max(0.0, 2 * high) or 1.0
        step = _round_step((high - low) / 4)
        self.low, self.high = low, high
        count = int(high / step + 1e-9) - math.ceil(low / step - 1e-9)
        first = math.ceil(low / step - 1e-9)
        self.ticks = [(first + position) * step for position in range(count + 1)]

    def position(self, value: float) -> float:
        """Returns the position of a value: 0 at the low end, 1 at the high end."""
        at = math.log10(value) if self.log else value
        return (at - self.low) / ((self.high - self.low) or 1.0)


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * nice for nice in (1, 2, 2.5, 5, 10) if power * nice >= rough * 0.999)


def _x(scale: _Scale, value: float) -> float:
    return _LEFT + scale.position(value) * (_WIDTH - _LEFT - _RIGHT)


def _y(scale: _Scale, value: float) -> float:
    return _HEIGHT - _BOTTOM - scale.position(value) * (_HEIGHT - _TOP - _BOTTOM)


def _middle() -> float:
    return (_LEFT + _WIDTH - _RIGHT) / 2


def _path(points: Points, across: _Scale, scale: _Scale) -> str:
    return "M" + "L".join(f"{_x(across, x):.1f} {_y(scale, y):.1f}" for x, y in points)


def _grid(across: _Scale, scale: _Scale, x_label: str) -> list[str]:
    marks = [_text(_x(across, t), _HEIGHT - _BOTTOM + 13, _tick(t), "mid") for t in across.ticks]
    return [*_rules(scale), *marks, _text(_middle(), _HEIGHT - 4, x_label, "mid")]


def _rules(scale: _Scale) -> list[str]:
    parts = []
    for tick in scale.ticks:
        y = _y(scale, tick)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(_text(_LEFT - 5, y + 3.5, _tick(tick), "end"))
    return parts


def _tick(value: float) -> str:
    if abs(value) >= 10_000:
        thousands = value / 1000
        return f"{thousands / 1000:g}M" if abs(thousands) >= 1000 else f"{thousands:g}k"
    if value == 0 or abs(value) >= 1e-2:
        return f"{value:.10g}"
    digits, _, power = f"{value:.2e}".partition("e")
    return f"{float(digits):g}e{int(power)}"


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text class="{anchor}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _svg(label: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">'
        f"{''.join(parts)}</svg>"
    )


def _key(names: Sequence[str], colours: Sequence[int] | None = None) -> str:
    chosen = colours if colours is not None else [place % _COLOURS for place in range(len(names))]
    items = "".join(
        f'<li><span class="b{colour}"></span>{escape(name)}</li>'
        for name, colour in zip(names, chosen, strict=True)
    )
    return f'<ul class="key">{items}</ul>'
