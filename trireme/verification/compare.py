"""Finds the first difference between the steps of a job and those of a process that stands for it.

What is allowed follows from the precision, the length of the sums, and how the run itself makes
small differences grow: a third run begins with values that are off by one in the last place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from trireme.verification.record import Record
from trireme.verification.sketch import FLOAT32, Sketch, distance, number

_LEAST = 64.0  # times the precision
_BY_EXAMPLES = 8.0  # times the root of the number of examples: errors of sums grow so
_NARROW = 4.0  # times one that is less than that of float32, in which sums are made
_GROWN = 10.0  # times the distance that values off by one in the last place have led to
_OF_ALL = 0.01  # of the norm of all gradients, for one that is nothing but rounding
_STATE = 10.0  # times what a gradient may differ by: squares, and means of several steps
_SETTINGS = 1e-6
_CONTENTS = 1e-4  # of examples, which may be the result of another model
_NONE = number(math.nan)


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

    steps: tuple[int, ...]  # that both have
    first: Difference | None  # in the order of the computation
    curve: Mapping[int, float]  # how far the values are apart, relative to how far they have moved
    tolerance: float  # of gradients at the first step, relative


def compare(
    job: Mapping[int, Record],
    reference: Mapping[int, Record],
    *,
    grown: Mapping[int, Record] | None = None,
    tolerance: float | None = None,
) -> Comparison:
    """Compares the steps of two runs; the tolerance of gradients is relative, and None derives it.

    What differs by no more than a few times as much as those of the third run is the same.
    """
    steps = [step for step in sorted(job.keys() & reference.keys()) if step]
    if tolerance is None:
        begun = [run[step] for step in steps[:1] for run in (job, reference)]
        tolerance = max(map(_tolerance, begun), default=0.0)
    first: Difference | None = None
    curve: dict[int, float] = {}
    for count, step in enumerate(steps, 1):
        curve[step] = _far(job[step].stage("values"), reference[step].stage("values"))
        third = (grown or {}).get(step, Record())
        first = first or _first(job[step], reference[step], third, tolerance, math.sqrt(count))
    one, other = (max(run, default=0) for run in (job, reference))
    if first is None and one != other:
        last = min(one, other) + 1
        first = Difference(last, "steps", "", float(one), float(other), abs(one - other), 0.0)
    return Comparison(tuple(steps), first, curve, tolerance)


def _tolerance(step: Record) -> float:
    wide = max(_LEAST, _BY_EXAMPLES * math.sqrt(step.weight))
    return step.eps * wide if step.eps <= FLOAT32 else max(_NARROW * step.eps, FLOAT32 * wide)


def _far(mine: Mapping[str, Sketch], others: Mapping[str, Sketch]) -> float:
    """Returns how far values are apart, relative to how far they have moved."""
    apart = math.hypot(*(distance(mine[name], others[name]) for name in mine if name in others))
    return apart / max(math.hypot(*(each.norm for each in others.values())), 1e-300)


def _first(
    job: Record, reference: Record, grown: Record, tolerance: float, growth: float
) -> Difference | None:
    """Returns the first difference of a step, in the order of the computation.

    The tolerance is that of the first step, and errors have grown since.
    """
    if job.positions != reference.positions:
        counts = len(job.positions), len(reference.positions)
        return Difference(job.step, "examples", "positions", *counts, math.inf, 0.0)
    tolerance *= growth
    every = math.hypot(*(each.norm for each in reference.stage("gradient").values()))
    allowed = {  # by stage: of the norm, and besides
        "examples": (max(_CONTENTS, tolerance), 0.0),
        "loss": (tolerance, 1e-3 * tolerance),
        "gradient": (tolerance, _OF_ALL * tolerance * every),
        "settings": (_SETTINGS, 1e-18),
        "values": (tolerance, 0.0),
        "buffers": (tolerance, 0.0),
        "state": (_STATE * tolerance, 0.0),
    }
    for stage, (relative, besides) in allowed.items():
        mine, others, thirds = (run.stage(stage) for run in (job, reference, grown))
        if stage == "examples" and (job.shapes != reference.shapes or not job.shapes):
            continue
        for name in mine | others:
            if stage != "settings" and not (name in mine and name in others):
                continue  # a tensor of another part of the model, or another number of losses
            one, other = mine.get(name, _NONE), others.get(name, _NONE)
            most = relative * other.norm + besides + growth * other.last
            most += _GROWN * distance(thirds.get(name, other), other)
            if not (apart := distance(one, other)) <= most:
                return Difference(job.step, stage, name, one.size, other.size, apart, most)
    return None
