"""Local search: small changes of a placement, kept where they shorten the step."""

from __future__ import annotations

import math
import random

import numpy as np

from trireme.graph.place.costs import Ints
from trireme.graph.place.problem import Problem
from trireme.graph.place.simulation import Score

_WARM, _COLD = 0.02, 0.0002
"""How much longer a step may become by a change that is kept, in the beginning and the end."""


def improved(problem: Problem, choice: Ints, evaluations: int, numbers: random.Random) -> Ints:
    """Returns the best choice that simulated annealing finds in so many evaluations.

    S. Kirkpatrick, C. D. Gelatt and M. P. Vecchi, "Optimization by Simulated Annealing", Science
    220 (1983). Bytes above the limits count as seconds while it searches; of all that it has seen
    it returns that with the least bytes above the limits, and among these the shortest step.
    """
    score = problem.score(choice)
    best, least = choice, score
    scale = max(score.seconds, 1e-300)
    byte = 10 / max(float(problem.simulator.held.sum()), 1.0)

    def energy(of: Score) -> float:
        return of.risk / scale + byte * of.excess

    moves = _Moves(problem, numbers)
    if not moves.movable:
        return choice
    for turn in range(evaluations):
        changed = moves.change(choice)
        if changed is None:
            continue
        result = problem.score(changed)
        heat = _WARM * (_COLD / _WARM) ** (turn / evaluations)
        rise = energy(result) - energy(score)
        if rise <= 0 or numbers.random() < math.exp(-rise / heat):
            choice, score = changed, result
            if score < least:
                best, least = choice, score
        elif turn % 100 == 99 and energy(score) > energy(least) + 5 * heat:
            choice, score = best, least
    return best


class _Moves:
    """Changes of a choice: one unit, a section of the order, or the end of a section."""

    def __init__(self, problem: Problem, numbers: random.Random) -> None:
        costs = problem.simulator.costs
        self._problem = problem
        self._numbers = numbers
        self._devices = problem.simulator.devices
        self.movable: list[int] = np.flatnonzero(problem.allowed.sum(axis=1) > 1).tolist()
        near: list[set[int]] = [set() for _ in problem.allowed]
        makers = problem.units[costs.makers[costs.values]].tolist()
        readers = problem.units[costs.readers].tolist()
        for maker, reader in zip(makers, readers, strict=True):
            near[maker].add(reader)
            near[reader].add(maker)
        self._near = [sorted(each) for each in near]

    def change(self, choice: Ints) -> Ints | None:
        """Returns another choice, or None if the change that came up changes nothing."""
        kind = self._numbers.random()
        if kind < 0.45:
            units, device = self._one(choice)
        elif kind < 0.7:
            units, device = self._section()
        else:
            units, device = self._shift(choice)
        changed = choice.copy()
        units = units[self._problem.allowed[units, device]]
        changed[units] = device
        return None if (changed == choice).all() else changed

    def _one(self, choice: Ints) -> tuple[Ints, int]:
        unit = self._numbers.choice(self.movable)
        near = self._near[unit]
        if near and self._numbers.random() < 0.5:
            device = int(choice[self._numbers.choice(near)])
        else:
            device = self._numbers.randrange(self._devices)
        return np.array([unit]), device

    def _length(self) -> int:
        longest = math.log(max(2, len(self._problem.units) // 2))
        return round(math.exp(self._numbers.uniform(0, longest)))

    def _section(self) -> tuple[Ints, int]:
        begins = self._numbers.randrange(len(self._problem.units))
        units = self._problem.units[begins : begins + self._length()]
        return units, self._numbers.randrange(self._devices)

    def _shift(self, choice: Ints) -> tuple[Ints, int]:
        """Moves the border between two sections on different devices."""
        units = self._problem.units
        placed = choice[units]
        borders = np.flatnonzero(placed[1:] != placed[:-1])
        if not len(borders):
            return self._section()
        border, length = int(self._numbers.choice(borders)) + 1, self._length()
        if self._numbers.random() < 0.5:
            return units[border : border + length], int(placed[border - 1])
        return units[max(0, border - length) : border], int(placed[border])
