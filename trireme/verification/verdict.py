"""What is said of a job: whether it is the same as one process, and if not, where and why."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from jinja2 import Environment, PackageLoader, StrictUndefined

from trireme.printable import printable
from trireme.verification.compare import Comparison, Difference

Outcome = Literal["same", "differs", "apart", "refused", "failed"]

_WORDS: Mapping[Outcome, str] = {
    "same": "the same as {0.against}, in {1} steps",
    "differs": "DIFFERS from {0.against}",
    "apart": "differs by its nature",
    "refused": "refused",
    "failed": "FAILED",
}


@dataclass(frozen=True)
class Verdict:
    """What is said of one job.

    Its outcome is `same`; `differs`; `apart`: it cannot equal one process, by its nature;
    `refused`: the program or the launch cannot run so; `failed`: a run ended before its last step.
    """

    name: str  # of the job, such as `sync, ps=1, workers=2`
    outcome: Outcome
    reason: str = ""
    comparison: Comparison | None = None  # None where a run has failed
    against: str = "one process"  # what it was compared with
    notes: Sequence[str] = ()  # what was changed for the comparison, or is to be known of it

    @property
    def word(self) -> str:
        steps = 0 if self.comparison is None else len(self.comparison.steps)
        return _WORDS[self.outcome].format(self, steps)

    @property
    def distance(self) -> float | None:
        """How far the values are apart at the end, relative to how far training moved them."""
        curve = {} if self.comparison is None else self.comparison.curve
        return curve[max(curve)] if curve else None

    def lines(self) -> Iterator[str]:
        """Yields the verdict as lines of text."""
        yield f"{self.name}: {self.word}"
        found = self.comparison
        if found is not None and found.first is not None:
            yield f"  first: step {found.first.step}, {described(found.first)}"
        if self.reason:
            yield f"  why: {self.reason}"
        if found is not None and self.distance is not None:
            yield (
                f"  values at the end: {self.distance:.1e} apart, relative to how far training "
                f"has moved them; tolerance of gradients {found.tolerance:.1e}"
            )
        yield from (f"  note: {note}" for note in self.notes)

    def __str__(self) -> str:
        return "\n".join(self.lines())


def described(difference: Difference) -> str:
    """Returns a difference in words."""
    what, norm = f"{difference.stage} {difference.name}".strip(), difference.reference
    if difference.stage in ("loss", "settings", "steps"):
        both = f"{difference.job:.9g} and {norm:.9g}"
        return f"{what} ({both}; at most {difference.allowed:.1e} apart is allowed)"
    if not math.isfinite(difference.distance):
        return f"{what} (they are others, or other elements are NaN or infinite)"
    of = "movement" if difference.stage in ("values", "buffers") else "norm"
    apart, allowed = (
        each / max(norm, 1e-300) for each in (difference.distance, difference.allowed)
    )
    return f"{what} ({apart:.1e} of its {of} apart; {allowed:.1e} is allowed)"


def exit_status(verdicts: Sequence[Verdict]) -> int:
    """Returns the status of the command: 0 same, 1 a job differs, 3 a run failed."""
    outcomes = {each.outcome for each in verdicts}
    if "differs" in outcomes:
        return 1
    return 3 if "failed" in outcomes or outcomes == {"refused"} else 0


def page(program: str, verdicts: Sequence[Verdict]) -> str:
    """Returns a self-contained page of HTML with curves, which needs no network."""
    loader = PackageLoader("trireme.verification", "")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    # The logarithm of NaN is that of the least.
    environment.filters |= {
        "printable": printable,
        "log": lambda value: math.log10(min(max(1e-12, value), 1e3)),
    }
    template = environment.get_template("page.html.jinja")
    return template.render(program=program, verdicts=verdicts)
