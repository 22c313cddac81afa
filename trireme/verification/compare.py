"""Finds the first difference between the steps of a job and those of a process that stands for it.

What is allowed follows from the precision, the length of the sums, and how the run itself makes
small differences grow: a third run begins with values that are off by one in the last place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from trireme.verification.record import Record
from trireme.verification.sketch import FLOAT32, Sketch, distance

_LEAST = 64.0  # times the precision
_BY_EXAMPLES = 8.0  # times the root of the number of examples: errors of sums grow so
_NARROW = 4.0  # times one that is less than that of float32, in which sums are made
_GROWN = 10.0  # times the distance that values off by one in the last place have led to
_OF_ALL = 0.01  # of the norm of all gradients, for one that is nothing but rounding
_STATE = 10.0  # times what a gradient may differ by: squares, and means of several steps
_SETTINGS = 1e-6
_CONTENTS = 1e-3  # of an example, which may be the result of another model

STAGES = ("examples", "loss", "gradient", "settings", "values", "buffers", "state", "steps")
"""What is compared of a step, in the order of the computation; and how many steps there are."""


@dataclass(frozen=True)
class Difference:
    """A quantity of a step that is compared."""

    step: int
    stage: str  # one of `STAGES`
    name: str  # of the tensor, or of the setting
    job: float  # the number, or the norm of the tensor, or of its movement
    reference: float
    distance: float  # infinite, or NaN, where only one run has it
    allowed: float


@dataclass(frozen=True)
class Comparison:
    """What came of comparing two runs."""

    steps: tuple[int, ...]  # that both have
    found: tuple[Difference, ...]  # those of the first step that has one, in the order of `STAGES`
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
        tolerance = max(
            (_tolerance(run[s]) for s in steps[:1] for run in (job, reference)), default=0.0
        )
    found: list[Difference] = []
    curve: dict[int, float] = {}
    for count, step in enumerate(steps, 1):
        pair = _Pair(job[step], reference[step], (grown or {}).get(step, Record()))
        curve[step] = pair.far()
        if not found:
            every = pair.compared(tolerance * math.sqrt(count), count)
            found = [each for each in every if not each.distance <= each.allowed]
    one, other = (float(max(run, default=0)) for run in (job, reference))
    if not found and one != other:
        step = int(min(one, other)) + 1
        found = [Difference(step, "steps", "", one, other, abs(one - other), 0.0)]
    return Comparison(tuple(steps), tuple(found), curve, tolerance)


def _tolerance(step: Record) -> float:
    wide = max(_LEAST, _BY_EXAMPLES * math.sqrt(step.weight))
    return step.eps * wide if step.eps <= FLOAT32 else max(_NARROW * step.eps, FLOAT32 * wide)


@dataclass(frozen=True)
class _Pair:
    """A step of the job and of the process that stands for it, and how rounding has grown."""

    job: Record
    reference: Record
    grown: Record

    def far(self) -> float:
        """Returns how far the values are apart, relative to how far they have moved."""
        mine, others = self.job.kind("values"), self.reference.kind("values")
        apart = math.hypot(*(distance(mine[name], others[name]) for name in mine if name in others))
        return apart / max(math.hypot(*(each.norm for each in others.values())), 1e-300)

    def compared(self, tolerance: float, count: int) -> Iterator[Difference]:
        """Yields all that is compared, in the order of `STAGES`."""
        yield from self._examples()
        yield from self._losses(tolerance)
        gradients = self.reference.kind("gradient").values()
        noise = _OF_ALL * math.hypot(*(each.norm for each in gradients))
        yield from self._tensors("gradient", lambda one: tolerance * (one.norm + noise))
        yield from self._settings()
        for stage in ("values", "buffers"):
            yield from self._tensors(
                stage, lambda one: tolerance * one.norm + one.last * math.sqrt(count)
            )
        yield from self._tensors("state", lambda one: _STATE * tolerance * one.norm)

    def _of(self, stage: str, name: str, *numbers: float) -> Difference:
        return Difference(self.job.step, stage, name, *numbers)

    def _examples(self) -> Iterator[Difference]:
        mine, others = self.job, self.reference
        if mine.positions != others.positions:
            yield self._of("examples", "positions", mine.weight, mine.weight, 1.0, 0.0)
        alike = [shape for shape, _ in mine.calls] == [shape for shape, _ in others.calls]
        for (_, one), (_, other) in zip(mine.calls, others.calls, strict=False):
            near = _CONTENTS * max(map(abs, other), default=0.0)
            if alike and len(one) == len(other):
                apart = sum(not abs(a - b) <= near for a, b in zip(one, other, strict=True))
                yield self._of("examples", "contents", len(one), len(one), float(apart), 0.0)

    def _losses(self, tolerance: float) -> Iterator[Difference]:
        mine, others = self.job.losses, self.reference.losses
        thirds = self.grown.losses if len(self.grown.losses) == len(others) else others
        for place, (one, other, third) in enumerate(zip(mine, others, thirds, strict=False), 1):
            name = "the loss" if len(others) == 1 else f"the loss of backward() {place}"
            allowed = tolerance * max(abs(other), 1e-3) + _GROWN * abs(other - third)
            apart = 0.0 if math.isnan(one) and math.isnan(other) else abs(one - other)
            if len(mine) == len(others):
                yield self._of("loss", name, one, other, apart, 0.0 if apart == 0.0 else allowed)

    def _settings(self) -> Iterator[Difference]:
        mine, others = self.job.settings, self.reference.settings
        for name in mine | others:
            one, other = mine.get(name, math.nan), others.get(name, math.nan)
            apart = 0.0 if one == other else abs(one - other)
            yield self._of("settings", name, one, other, apart, max(_SETTINGS * abs(other), 1e-18))

    def _tensors(self, stage: str, allow: Callable[[Sketch], float]) -> Iterator[Difference]:
        others, thirds = self.reference.kind(stage), self.grown.kind(stage)
        for name, one in self.job.kind(stage).items():
            if name in others:
                other = others[name]
                allowed = allow(other) + _GROWN * distance(thirds.get(name, other), other)
                yield self._of(stage, name, one.norm, other.norm, distance(one, other), allowed)
