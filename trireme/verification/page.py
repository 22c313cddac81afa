"""The page of `trireme verify --html`: verdicts, and curves of the differences by step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined

from trireme.printable import printable
from trireme.verification.verdict import Verdict

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 640, 180, 56, 24
_SMALLEST = 1e-12


@dataclass(frozen=True)
class Curve:
    """A line of SVG, with the labels of its axes."""

    points: str
    rows: Sequence[tuple[float, str]]
    last: int


def page(program: str, verdicts: Sequence[Verdict]) -> str:
    """Returns a self-contained page of HTML, which needs no network."""
    loader = PackageLoader("trireme.verification", "")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    rows = [
        ([printable(line) for line in verdict.lines()][1:], verdict, _curve(verdict))
        for verdict in verdicts
    ]
    return environment.get_template("page.html.jinja").render(
        program=printable(program), rows=rows, width=_WIDTH, height=_HEIGHT, left=_LEFT
    )


def _curve(verdict: Verdict) -> Curve | None:
    """Returns the curve of the largest difference by step, on a logarithmic scale."""
    curve: Mapping[int, float] = {} if verdict.comparison is None else verdict.comparison.curve
    if len(curve) < 2:
        return None
    logs = {
        step: math.log10(min(max(value, _SMALLEST), 1e3)) for step, value in sorted(curve.items())
    }
    low, high = math.floor(min(logs.values())), math.ceil(max(logs.values()))
    high = max(high, low + 1)
    first, last = min(logs), max(logs)

    def across(step: int) -> float:
        return _LEFT + (step - first) / (last - first) * (_WIDTH - _LEFT - 8)

    def up(value: float) -> float:
        return 8 + (high - value) / (high - low) * (_HEIGHT - _BOTTOM - 8)

    points = " ".join(f"{across(step):.1f},{up(value):.1f}" for step, value in logs.items())
    stride = max(1, (high - low) // 4)
    rows = [(up(power), f"1e{power}") for power in range(low, high + 1, stride)]
    return Curve(points, rows, last)
