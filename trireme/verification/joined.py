"""Joins what several workers have recorded of a step into what one process would record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from trireme.verification.record import Record
from trireme.verification.sketch import Sketches, means


@dataclass(frozen=True)
class Step:
    """The numbers of one step of a job, or of a process that stands for it."""

    number: int
    workers: tuple[Record, ...] = ()  # those that had examples, in the order of the examples
    spans: tuple[tuple[int, int], ...] = ()
    examples: list[list[int]] = field(default_factory=list)
    marks: list[list[float]] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    settings: list[dict[str, float]] = field(default_factory=list)
    computed: Sketches = field(default_factory=dict)
    pushed: Sketches = field(default_factory=dict)
    buffers: Sketches = field(default_factory=dict)
    values: Sketches = field(default_factory=dict)
    state: Sketches = field(default_factory=dict)

    @property
    def line(self) -> str:
        return self.workers[0].line if self.workers else ""

    @property
    def weights(self) -> list[float]:
        """The weights of the workers' gradients in the mean."""
        return [each.weight for each in self.workers]


def joined(records: Mapping[int, Sequence[Record]]) -> dict[int, Step]:
    """Returns each step as one process would have made it: sums, and means over the examples."""
    return {number: _joined(number, each) for number, each in records.items()}


def _joined(number: int, records: Sequence[Record]) -> Step:
    part = [each for each in records if each.weight > 0] or list(records)
    part.sort(key=lambda each: (each.spans[:1], each.task))
    weights = [each.weight for each in part]
    plain = [1.0 if each.weighed else each.weight for each in part]
    chief = next((each for each in records if each.values), None)
    return Step(
        number,
        tuple(part),
        _united([span for each in part for span in each.spans]),
        *_examples(part),
        _losses(part, weights),
        part[0].settings,
        means((weight, each.computed) for weight, each in zip(plain, part, strict=True)),
        part[0].pushed
        if part[0].weighed
        else means((weight, each.pushed) for weight, each in zip(weights, part, strict=True)),
        means((1.0, each.buffers) for each in records),
        {} if chief is None else chief.values,
        {} if chief is None else chief.state,
    )


def _examples(
    part: Sequence[Record],
) -> tuple[list[list[int]], list[list[float]], list[str]]:
    """Returns, for each call of the model, what is known of all examples, and the shapes of one.

    Where shapes differ, by padding, the same examples have other contents: nothing is compared.
    """
    if len({len(each.shapes) for each in part}) != 1:
        return [], [], []
    digests = [list(chain(*call)) for call in zip(*(each.examples for each in part), strict=True)]
    marks = [list(chain(*call)) for call in zip(*(each.marks for each in part), strict=True)]
    shapes = [set(call) for call in zip(*(each.shapes for each in part), strict=True)]
    return digests, marks, [each.pop() if len(each) == 1 else "" for each in shapes]


def _losses(part: Sequence[Record], weights: Sequence[float]) -> list[float]:
    if len({len(each.losses) for each in part}) != 1:
        return []
    total = sum(weights) or 1.0
    columns = zip(*(each.losses for each in part), strict=True)
    return [
        sum(weight * loss for weight, loss in zip(weights, column, strict=True)) / total
        for column in columns
    ]


def _united(spans: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Returns spans with those that touch made one."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return tuple(found)
