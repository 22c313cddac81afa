"""The page of `trireme verify --html`: verdicts, and curves of the differences by step."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined

from trireme.printable import printable
from trireme.verification.verdict import Verdict


def page(program: str, verdicts: Sequence[Verdict]) -> str:
    """Returns a self-contained page of HTML, which needs no network."""
    loader = PackageLoader("trireme.verification", "")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    environment.filters |= {"printable": printable, "log": _log}
    template = environment.get_template("page.html.jinja")
    return template.render(program=program, verdicts=verdicts)


def _log(value: float) -> float:
    return math.log10(min(max(1e-12, value), 1e3))  # of NaN it is that of the least
