"""Finds the first difference between the steps of a job and those of a process that stands for it.

What is allowed follows from the dtype, the length of the sums, and how the run itself makes small
differences grow: a third run begins with values that are off by one in the last place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from trireme.verification.joined import Step
from trireme.verification.sketch import Sketch, Sketches, distance, minus

STAGES = ("examples", "loss", "gradient", "settings", "values", "buffers", "state")
"""What is compared of a step, in the order of the computation."""

_LEAST = 64.0  # times the eps of the dtype
_BY_EXAMPLES = 8.0  # times the root of the number of examples: errors of sums grow so
_GROWN = 10.0  # times the distance that values off by one in the last place have led to
_OF_ALL = 0.01  # of the norm of all gradients, for one that is nothing but rounding
_STATE = 10.0  # times what a gradient may differ by: squares, and means of several steps
_SETTINGS = 1e-6
_CONTENTS = 1e-3  # of an example, which may be the result of another model
_FLOAT32 = 2.0**-23


@dataclass(frozen=True)
class Difference:
    """A quantity of a step that differs.

    Attributes:
        step: the global step.
        stage: what, one of `STAGES`.
        name: of the tensor, or of the setting.
        job, reference: its norm, or the number itself.
        distance: how far they are apart.
        allowed: how far they may be.
    """

    step: int
    stage: str
    name: str
    job: float
    reference: float
    distance: float
    allowed: float

    @property
    def relative(self) -> float:
        return self.distance / max(abs(self.reference), 1e-300)


@dataclass(frozen=True)
class Comparison:
    """What came of comparing two runs.

    Attributes:
        steps: the steps that both have.
        found: all differences of the first step that has one, in the order of `STAGES`.
        curve: by step, how far the values are apart, relative to how far training has moved them.
        tolerance: the relative tolerance of gradients at the first step.
    """

    steps: tuple[int, ...]
    found: tuple[Difference, ...]
    curve: Mapping[int, float]
    tolerance: float

    @property
    def first(self) -> Difference | None:
        return self.found[0] if self.found else None


def compare(
    job: Mapping[int, Step],
    reference: Mapping[int, Step],
    *,
    grown: Mapping[int, Step] | None = None,
    tolerance: float | None = None,
) -> Comparison:
    """Compares two runs step by step.

    Args:
        job: the steps of the job.
        reference: those of the process that stands for it.
        grown: those of the same process from values that are off by one in the last place; what
            differs by no more than a few times as much is the same.
        tolerance: relative, of gradients; None derives it from the dtype and the number of
            examples.
    """
    every = sorted(job.keys() & reference.keys())
    steps = [step for step in every if job[step].workers and step]
    begin = next((reference[s] for s in sorted(reference) if reference[s].values), Step(0))
    own = _tolerance(reference[steps[0]]) if steps else 0.0
    chosen = own if tolerance is None else tolerance
    found: tuple[Difference, ...] = ()
    curve: dict[int, float] = {}
    for count, step in enumerate(steps, 1):
        third = None if grown is None else grown.get(step)
        judge = _Judge(job[step], reference[step], begin, third, chosen, count)
        curve[step] = judge.far()
        found = found or tuple(judge.differences())
    return Comparison(tuple(steps), found, curve, chosen)


def _tolerance(step: Step) -> float:
    eps = max([each.eps for each in step.pushed.values()], default=_FLOAT32)
    examples = max(1.0, sum(step.weights))
    return eps * max(_LEAST, _BY_EXAMPLES * math.sqrt(examples))


class _Judge:
    """Compares one step."""

    def __init__(
        self,
        job: Step,
        reference: Step,
        begin: Step,
        grown: Step | None,
        tolerance: float,
        count: int,
    ) -> None:
        self._job, self._reference, self._begin, self._grown = job, reference, begin, grown
        self._tolerance = tolerance * math.sqrt(count)
        self._count = count

    def differences(self) -> Iterator[Difference]:
        yield from self._examples()
        yield from self._losses()
        yield from self._gradients()
        yield from self._settings()
        yield from self._tensors("values")
        yield from self._tensors("buffers")
        yield from self._states()

    def far(self) -> float:
        """Returns how far the values are apart, relative to how far they have moved."""
        moved = apart = 0.0
        for name, one, other in _both(self._job.values, self._reference.values):
            moved += _moved(other, self._begin.values.get(name)) ** 2
            apart += distance(one, other) ** 2
        return math.sqrt(apart) / max(math.sqrt(moved), 1e-300) if apart else 0.0

    def _difference(
        self, stage: str, name: str, job: float, reference: float, apart: float, allowed: float
    ) -> Iterator[Difference]:
        if not apart <= allowed:
            yield Difference(self._job.number, stage, name, job, reference, apart, allowed)

    def _examples(self) -> Iterator[Difference]:
        mine, others = self._job, self._reference
        if mine.spans != others.spans:
            yield self._of_examples("positions", 1)
        if mine.shapes != others.shapes or "" in mine.shapes:
            return
        pairs = zip(
            *(mine.examples, others.examples, mine.marks, others.marks), strict=True
        )  # of each call of the model
        for one, other, ours, theirs in pairs:
            near = _CONTENTS * max(map(abs, theirs), default=0.0)
            apart = sum(a != b for a, b in zip(one, other, strict=False))
            apart += sum(not abs(a - b) <= near for a, b in zip(ours, theirs, strict=False))
            if apart and (len(one), len(ours)) == (len(other), len(theirs)):
                yield self._of_examples("contents", apart)
                return

    def _of_examples(self, what: str, apart: int) -> Difference:
        count = float(sum(map(len, self._job.examples[:1])) or sum(self._job.weights))
        return Difference(self._job.number, "examples", what, count, count, float(apart), 0.0)

    def _losses(self) -> Iterator[Difference]:
        mine, others = self._job.losses, self._reference.losses
        if len(mine) != len(others):
            return
        for place, (one, other) in enumerate(zip(mine, others, strict=True)):
            third = self._grown.losses[place : place + 1] if self._grown is not None else []
            scale = max(abs(other), 1e-3)
            allowed = self._tolerance * scale + _GROWN * sum(abs(other - each) for each in third)
            apart = math.inf if math.isnan(one) != math.isnan(other) else abs(one - other)
            if math.isnan(one) and math.isnan(other):
                apart = 0.0
            name = "the loss" if len(mine) == 1 else f"the loss of backward() {place + 1}"
            yield from self._difference("loss", name, one, other, apart, allowed)

    def _gradients(self) -> Iterator[Difference]:
        of_all = math.sqrt(sum(each.norm**2 for each in self._reference.computed.values()))
        for name, one, other in _both(self._job.computed, self._reference.computed):
            scale = other.norm + _OF_ALL * of_all
            allowed = self._tolerance * scale + self._growth("computed", name, other)
            yield from self._difference(
                "gradient", name, one.norm, other.norm, distance(one, other), allowed
            )

    def _settings(self) -> Iterator[Difference]:
        pairs = zip(self._job.settings, self._reference.settings, strict=False)
        for place, (mine, others) in enumerate(pairs):
            for name in mine.keys() & others.keys():
                one, other = mine[name], others[name]
                group = f" of group {place}" if len(self._job.settings) > 1 else ""
                yield from self._difference(
                    *("settings", name + group, one, other),
                    *(abs(one - other), _SETTINGS * max(abs(other), 1e-12)),
                )

    def _tensors(self, stage: str) -> Iterator[Difference]:
        mine, others = getattr(self._job, stage), getattr(self._reference, stage)
        for name, one, other in _both(mine, others):
            moved = _moved(other, getattr(self._begin, stage).get(name))
            rounding = other.eps * other.norm * math.sqrt(self._count)
            allowed = self._tolerance * moved + rounding + self._growth(stage, name, other)
            yield from self._difference(
                stage, name, one.norm, other.norm, distance(one, other), allowed
            )

    def _states(self) -> Iterator[Difference]:
        for name, one, other in _both(self._job.state, self._reference.state):
            allowed = _STATE * self._tolerance * other.norm + self._growth("state", name, other)
            yield from self._difference(
                "state", name, one.norm, other.norm, distance(one, other), allowed
            )

    def _growth(self, stage: str, name: str, reference: Sketch) -> float:
        third = None if self._grown is None else getattr(self._grown, stage).get(name)
        return 0.0 if third is None else _GROWN * distance(third, reference)


def _both(one: Sketches, other: Sketches) -> Iterator[tuple[str, Sketch, Sketch]]:
    return ((name, one[name], other[name]) for name in one if name in other)


def _moved(now: Sketch, begin: Sketch | None) -> float:
    return now.norm if begin is None or begin.count != now.count else minus(now, begin).norm
