"""Finds the first difference between the steps of a job and those of a process that stands for it.

What is allowed follows from the precision, the length of the sums, and how the run itself makes
small differences grow: a third run begins with values that are off by one in the last place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
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
_CONTENTS = 1e-3  # of an example, which may be the result of another model
_NONE = number(math.nan)
_Allowances = dict[str, Callable[[Sketch], float]]


@dataclass(frozen=True)
class Difference:
    """A quantity of a step that is compared."""

    step: int
    stage: str  # `examples`, `steps`, or a kind of what a `Record` has
    name: str  # of the tensor, or of the setting
    job: float  # the number, or the norm of the tensor, or of its movement
    reference: float
    distance: float  # infinite, or NaN, where only one run has it
    allowed: float


@dataclass(frozen=True)
class Comparison:
    """What came of comparing two runs."""

    steps: tuple[int, ...]  # that both have
    found: tuple[Difference, ...]  # those of the first step that has one, as they are computed
    curve: Mapping[int, float]  # how far the values are apart, relative to how far they have moved
    tolerance: float  # of gradients at the first step, relative

    @property
    def first(self) -> Difference | None:
        return self.found[0] if self.found else None


def compare(
    job: Mapping[int, Record],
    reference: Mapping[int, Record],
    *,
    grown: Mapping[int, Record] | None = None,
    tolerance: float | None = None,
) -> Comparison:
    """Compares two runs step by step.

    Args:
        job: the steps of the job, joined.
        reference: those of the process that stands for it.
        grown: those of the same process from values that are off by one in the last place; what
            differs by no more than a few times as much is the same.
        tolerance: relative, of gradients; None derives it.
    """
    steps = [step for step in sorted(job.keys() & reference.keys()) if step]
    if tolerance is None:
        begun = [run[step] for step in steps[:1] for run in (job, reference)]
        tolerance = max(map(_tolerance, begun), default=0.0)
    found: list[Difference] = []
    curve: dict[int, float] = {}
    for count, step in enumerate(steps, 1):
        curve[step] = _far(job[step].kind("values"), reference[step].kind("values"))
        if not found:
            third = (grown or {}).get(step, Record())
            allowed = _allowances(reference[step], tolerance * math.sqrt(count), count)
            every = _compared(job[step], reference[step], third, allowed)
            found = [each for each in every if not each.distance <= each.allowed]
    one, other = (max(run, default=0) for run in (job, reference))
    if not found and one != other:
        last = min(one, other) + 1
        found = [Difference(last, "steps", "", float(one), float(other), abs(one - other), 0.0)]
    return Comparison(tuple(steps), tuple(found), curve, tolerance)


def _tolerance(step: Record) -> float:
    wide = max(_LEAST, _BY_EXAMPLES * math.sqrt(step.weight))
    return step.eps * wide if step.eps <= FLOAT32 else max(_NARROW * step.eps, FLOAT32 * wide)


def _far(mine: Mapping[str, Sketch], others: Mapping[str, Sketch]) -> float:
    """Returns how far values are apart, relative to how far they have moved."""
    apart = math.hypot(*(distance(mine[name], others[name]) for name in mine if name in others))
    return apart / max(math.hypot(*(each.norm for each in others.values())), 1e-300)


def _allowances(reference: Record, tolerance: float, count: int) -> _Allowances:
    """Returns how far each kind may be apart after some steps, in the order of the computation."""
    of_all = _OF_ALL * math.hypot(*(each.norm for each in reference.kind("gradient").values()))

    def moved(one: Sketch) -> float:
        return tolerance * one.norm + one.last * math.sqrt(count)

    return {
        "loss": lambda one: tolerance * max(one.norm, 1e-3),
        "gradient": lambda one: tolerance * (one.norm + of_all),
        "settings": lambda one: max(_SETTINGS * one.norm, 1e-18),
        "values": moved,
        "buffers": moved,
        "state": lambda one: _STATE * tolerance * one.norm,
    }


def _compared(
    job: Record, reference: Record, grown: Record, allowances: _Allowances
) -> Iterator[Difference]:
    """Yields all that is compared of a step, in the order of the computation."""
    for name, apart, count in _examples(job, reference):
        yield Difference(job.step, "examples", name, count, count, apart, 0.0)
    for stage, allow in allowances.items():
        mine, others, thirds = (run.kind(stage) for run in (job, reference, grown))
        for name in mine | others:
            if stage != "settings" and not (name in mine and name in others):
                continue  # a tensor of another part of the model, or another number of losses
            one, other = mine.get(name, _NONE), others.get(name, _NONE)
            allowed = allow(other) + _GROWN * distance(thirds.get(name, other), other)
            apart = distance(one, other)
            yield Difference(job.step, stage, name, one.size, other.size, apart, allowed)


def _examples(job: Record, reference: Record) -> Iterator[tuple[str, float, float]]:
    """Yields what is compared of the examples: how many are others, of how many."""
    yield "positions", float(job.positions != reference.positions), job.weight
    if [shape for shape, _ in job.calls] != [shape for shape, _ in reference.calls]:
        return
    for (_, mine), (_, others) in zip(job.calls, reference.calls, strict=True):
        near = _CONTENTS * max(map(abs, others), default=0.0)
        if len(mine) == len(others):
            apart = sum(not abs(a - b) <= near for a, b in zip(mine, others, strict=True))
            yield "contents", float(apart), len(mine)
