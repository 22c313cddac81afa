"""Finds the first difference between a job and a process that stands for it, and says it.

What is allowed follows from the precision, the length of the sums, and how the run itself makes
small differences grow: a third run begins with values that are off in their last places.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from jinja2 import Environment, PackageLoader, StrictUndefined

from trireme.printable import printable
from trireme.verification.record import FLOAT32, Record, Sketch, distance, number

_LEAST = 64.0  # times the precision
_BY_EXAMPLES = 8.0  # times the root of the number of examples: errors of sums grow so
_NARROW = 4.0  # times one that is less than that of float32, in which sums are made
_GROWN = 10.0  # times the distance that values off in their last places have led to
_NONE = number(math.nan)

Outcome = Literal["same", "differs", "apart", "refused", "failed"]


@dataclass(frozen=True)
class Difference:
    """A quantity of a step that differs."""

    step: int
    stage: str  # `steps`, or one of what a `Record` has
    name: str  # of the tensor, or of the setting
    job: float  # the number, or the norm of the tensor, or of its movement
    reference: float
    distance: float  # infinite, or NaN, where only one run has it
    allowed: float


@dataclass(frozen=True)
class Comparison:
    """What came of comparing two runs."""

    steps: tuple[int, ...] = ()  # that both have
    first: Difference | None = None  # in the order of the computation
    curve: Mapping[int, float] = field(default_factory=dict)  # how far values are apart, see `_far`
    tolerance: float = 0.0  # of gradients at the first step, relative


def compare(
    job: Mapping[int, Record],
    reference: Mapping[int, Record],
    *,
    grown: Sequence[Mapping[int, Record]] = (),
    tolerance: float | None = None,
) -> Comparison:
    """Compares the steps of two runs; the tolerance of gradients is relative, and None derives it.

    What differs by no more than a few times as much as in runs that have `grown` is the same.
    """
    steps = [step for step in sorted(job.keys() & reference.keys()) if step]
    if tolerance is None:
        begun = [run[step] for step in steps[:1] for run in (job, reference)]
        tolerance = max(map(_tolerance, begun), default=0.0)
    first: Difference | None = None
    curve: dict[int, float] = {}
    for count, step in enumerate(steps, 1):
        curve[step] = _far(job[step].stage("values"), reference[step].stage("values"))
        thirds = [run.get(step, Record()) for run in grown]
        first = first or _first(job[step], reference[step], thirds, tolerance, math.sqrt(count))
    one, other = (max(run, default=0) for run in (job, reference))
    if first is None and one != other:
        last = min(one, other) + 1
        first = Difference(last, "steps", "", float(one), float(other), abs(one - other), 0.0)
    return Comparison(tuple(steps), first, curve, tolerance)


def _tolerance(step: Record) -> float:
    wide = max(_LEAST, _BY_EXAMPLES * math.sqrt(step.weight))
    return max(_NARROW * step.eps, min(FLOAT32, step.eps) * wide)


def _far(mine: Mapping[str, Sketch], others: Mapping[str, Sketch]) -> float:
    """Returns how far values are apart, relative to how far they have moved."""
    apart = math.hypot(*(distance(mine[name], others[name]) for name in mine if name in others))
    return apart / max(math.hypot(*(each.norm for each in others.values())), 1e-300)


def _first(
    job: Record, reference: Record, grown: Sequence[Record], tolerance: float, growth: float
) -> Difference | None:
    """Returns the first difference of a step, in the order of the computation."""
    tolerance *= growth  # of errors, since the first step
    every = math.hypot(*(each.norm for each in reference.stage("gradient").values()))
    allowed = {  # by stage: of the norm, and besides
        "examples": (max(1e-3, tolerance), 0.0),  # which may be the result of another model
        "loss": (tolerance, 1e-3 * tolerance),
        "gradient": (tolerance, 0.01 * tolerance * every),  # one may be nothing but rounding
        "settings": (1e-6, 1e-18),
        "values": (tolerance, 0.0),
        "buffers": (tolerance, 0.0),
        "state": (10.0 * tolerance, 0.0),  # squares, and means of several steps
    }
    for stage, (relative, besides) in allowed.items():
        mine, others, *thirds = (run.stage(stage) for run in (job, reference, *grown))
        if stage == "examples" and (job.shapes, job.weight) != (reference.shapes, reference.weight):
            continue  # they are padded, or several processes compute the same
        for name in mine | others:
            if stage != "settings" and not (name in mine and name in others):
                continue  # a tensor of another part of the model, or another number of losses
            one, other = mine.get(name, _NONE), others.get(name, _NONE)
            most = relative * other.norm + besides + growth * other.last
            if stage != "examples":
                far = (distance(third.get(name, other), other) for third in thirds)
                most += _GROWN * max(far, default=0.0)
            if not (apart := distance(one, other)) <= most:
                return Difference(job.step, stage, name, one.size, other.size, apart, most)
    return None


@dataclass(frozen=True)
class Verdict:
    """What is said of one job.

    Its outcome is `same`; `differs`; `apart`: it cannot equal one process, by its nature;
    `refused`: the program or the launch cannot run so; `failed`: a run ended before its last step.
    """

    name: str  # of the job, such as `sync, ps=1, workers=2`
    outcome: Outcome
    reason: str = ""
    comparison: Comparison = Comparison()
    against: str = "one process"  # what it was compared with
    notes: Sequence[str] = ()  # what was changed for the comparison, or is to be known of it

    @property
    def word(self) -> str:
        words = {
            "same": f"the same as {self.against}, in {len(self.comparison.steps)} steps",
            "differs": f"DIFFERS from {self.against}",
            "apart": "differs by its nature",
        }
        return words.get(self.outcome, self.outcome)

    @property
    def distance(self) -> float | None:
        """How far the values are apart at the end, relative to how far training moved them."""
        curve = self.comparison.curve
        return curve[max(curve)] if curve else None

    def lines(self) -> Iterator[str]:
        """Yields the verdict as lines of text."""
        yield f"{self.name}: {self.word}"
        if (first := self.comparison.first) is not None:
            yield f"  first: step {first.step}, {described(first)}"
        if self.reason:
            yield f"  why: {self.reason}"
        if self.distance is not None:
            yield (
                f"  values at the end: {self.distance:.1e} apart, relative to how far training has "
                f"moved them; tolerance of gradients {self.comparison.tolerance:.1e}"
            )
        yield from (f"  note: {note}" for note in self.notes)

    def __str__(self) -> str:
        return "\n".join(self.lines())


def described(difference: Difference) -> str:
    """Returns a difference in words."""
    what = f"{difference.stage} {difference.name}".strip()
    if difference.stage in ("loss", "settings", "steps"):
        both = f"{difference.job:.9g} and {difference.reference:.9g}"
        return f"{what} ({both}; at most {difference.allowed:.1e} apart is allowed)"
    if not math.isfinite(difference.distance):
        return f"{what} (other elements are NaN or infinite, or it has another shape)"
    of = "movement" if difference.stage in ("values", "buffers") else "norm"
    norm = max(difference.reference, 1e-300)
    apart, allowed = difference.distance / norm, difference.allowed / norm
    return f"{what} ({apart:.1e} of its {of} apart; {allowed:.1e} is allowed)"


def exit_status(verdicts: Sequence[Verdict]) -> int:
    """Returns the status of the command: 0 same, 1 a job differs, 3 a run failed."""
    outcomes = {each.outcome for each in verdicts}
    failed = "failed" in outcomes or outcomes == {"refused"}
    return 1 if "differs" in outcomes else 3 * failed


def page(program: str, verdicts: Sequence[Verdict]) -> str:
    """Returns a self-contained page of HTML with curves, which needs no network."""
    loader = PackageLoader("trireme.verification", "")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    environment.filters["printable"] = printable
    # of NaN it is that of the least
    environment.filters["log"] = lambda value: math.log10(min(max(1e-12, value), 1e3))
    return environment.get_template("page.html.jinja").render(program=program, verdicts=verdicts)
