"""Placements of one model to compare, and their steps on two processes."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from benchmarks.graph_pair import Measured, Pair
from benchmarks.pairs import Sample
from trireme.graph.place.costs import Constraints, CostGraph, Devices
from trireme.graph.place.placement import Placement, place
from trireme.graph.place.prediction import Prediction, predict

AUTOMATIC, SINGLE, ROUND_ROBIN = "automatic", "all on one", "round robin"
RANDOM, EXPERT = "best of 200 random", "expert's"
RANDOM_PLACEMENTS = 200

PIECES = (1, 4)
"""The numbers of micro-batches that strategy `graph` compares for two tasks."""

_STEPS = 3


@dataclass(frozen=True)
class Chosen:
    """A placement with the number of micro-batches for which it is predicted to be fastest.

    Attributes:
        devices: the device of each operation.
        pieces: the number of micro-batches.
        prediction: the predicted step of the placement: seconds, memory and transfers.
        algorithm: what found it.
    """

    devices: Devices
    pieces: int
    prediction: Prediction
    algorithm: str

    @property
    def milliseconds(self) -> float:
        """The predicted duration of a step."""
        return 1e3 * self.prediction.step_seconds


def automatic(measured: Measured) -> Chosen:
    """Returns what strategy `graph` would do."""
    return _fastest(_each(measured, _place(measured, "best")))


def chosen(measured: Measured, seed: int) -> dict[str, Chosen]:
    """Returns the placements to compare, by the contender's name.

    Args:
        measured: the model.
        seed: of the random placements.
    """
    return {
        AUTOMATIC: automatic(measured),
        SINGLE: _fastest(_each(measured, _place(measured, "single"))),
        ROUND_ROBIN: _fastest(_each(measured, _place(measured, "round-robin"))),
        RANDOM: _fastest(_drawn(measured, random.Random(seed))),
        EXPERT: _fastest(_predicted(measured, measured.expert, "by hand")),
    }


@dataclass
class Stepping:
    """A contender: the steps by one placement.

    Attributes:
        name: in the results.
        pair: the processes, which have loaded the placement by this name.
    """

    name: str
    pair: Pair

    def measure(self) -> Sample:
        """Returns the median of a few steps, in milliseconds."""
        steps = self.pair.steps(self.name, _STEPS)
        used = sum(sum(step.processor_seconds) for step in steps)
        return Sample(1e3 * statistics.median(step.seconds for step in steps), _STEPS, used)


def loaded(pair: Pair, placements: dict[str, Chosen]) -> list[Stepping]:
    """Has the processes load placements; returns the contenders, in the same order."""
    for name, each in placements.items():
        pair.load(name, each.devices, each.pieces)
    return [Stepping(name, pair) for name in placements]


def _place(measured: Measured, algorithm: str) -> Callable[[CostGraph, int], Placement]:
    def placement(costs: CostGraph, pieces: int) -> Placement:
        return place(
            costs,
            measured.hardware,
            measured.constraints,
            micro_batches=pieces,
            algorithm=algorithm,  # type: ignore[arg-type]
        )

    return placement


def _each(measured: Measured, placement: Callable[[CostGraph, int], Placement]) -> Iterator[Chosen]:
    for pieces, costs in measured.costs.items():
        found = placement(costs, pieces)
        yield Chosen(found.devices, pieces, found.prediction, found.algorithm)


def _predicted(measured: Measured, devices: Devices, algorithm: str) -> Iterator[Chosen]:
    for pieces, costs in measured.costs.items():
        prediction = predict(costs, measured.hardware, devices, pieces)
        yield Chosen(devices, pieces, prediction, algorithm)


def _drawn(measured: Measured, numbers: random.Random) -> Iterator[Chosen]:
    costs = next(iter(measured.costs.values()))
    names = list(measured.hardware.numbers)
    groups = _groups(costs, measured.constraints)
    for _ in range(RANDOM_PLACEMENTS):
        devices = dict[str, str]()
        for group in groups:
            devices |= dict.fromkeys(group, numbers.choice(names))
        yield from _predicted(measured, devices, "at random")


def _groups(costs: CostGraph, constraints: Constraints) -> list[set[str]]:
    """Returns the operations that must be together, and the others each alone."""
    groups: list[set[str]] = []
    for names in [{name} for name in costs.positions] + [set(g) for g in constraints.together]:
        for other in [each for each in groups if each & names]:
            groups.remove(other)
            names |= other
        groups.append(names)
    return groups


def _fastest(placements: Iterable[Chosen]) -> Chosen:
    return min(placements, key=lambda each: each.milliseconds)
