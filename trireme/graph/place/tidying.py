"""Undoes what local search did for nothing: small pieces apart from their neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from trireme.graph.place.cost_arrays import Bools, Ints
from trireme.graph.place.problem import Problem
from trireme.graph.place.simulation import Score

NOISE = 0.002
"""Which share of the risk a piece on a device of its own must gain: less cannot be predicted."""

_ALL_NOISE = 0.005
"""Which share of the risk all moves together may cost."""

_TRANSFER = 3
"""How many changes of the device a transfer outweighs, where the order interleaves branches."""


def tidied(problem: Problem, choice: Ints, evaluations: int) -> Ints:
    """Returns a choice with fewer pieces that is as good, but for noise.

    Moves parts of the graph to the device of their neighbours, those with the least computation
    first, where that makes the number of pieces smaller: of the segments, of the changes of the
    device in the order of the operations, and thrice that of the transfers. A move is refused where
    the risk grows by more than `NOISE`, or bytes above the limits are added. Many moves are tried
    at once, and where they are refused, each half of them.
    """
    search = _Search(problem, choice, evaluations)
    improves = True
    while improves and search.left > 0:
        improves = False
        for kind in (_islands_by_readings, _islands_by_order, _runs_after, _runs_before):
            moves = _possible(problem, search.choice, kind(problem, search.choice))
            improves |= bool(moves) and search.attempt(moves)
    return search.choice


class _Move(NamedTuple):
    """Units to be moved to a device."""

    units: Ints
    device: int


class _State(NamedTuple):
    """How good and how tidy a choice is."""

    score: Score
    pieces: int


class _Search:
    """The choice so far, and how many evaluations are left."""

    def __init__(self, problem: Problem, choice: Ints, evaluations: int) -> None:
        self._problem = problem
        self.choice = choice
        self.left = evaluations
        self._computed = _computed(problem)
        self._state = self._state_of(choice)
        self._unit = self._state.score.risk
        self._most = self._unit * (1 + _ALL_NOISE)

    def _state_of(self, choice: Ints) -> _State:
        simulator = self._problem.simulator
        parts = simulator.parts(choice[self._problem.units])
        order = parts.placed[self._computed]
        changes = int(np.count_nonzero(order[1:] != order[:-1]))
        pieces = simulator.segments(parts) + changes + _TRANSFER * len(parts.transfers.sizes)
        return _State(simulator.score(parts), pieces)

    def attempt(self, moves: list[_Move]) -> bool:
        """Makes all of the moves, or those of them that it may; returns whether it made any."""
        if self.left <= 0:
            return False
        self.left -= 1
        changed = self.choice.copy()
        for move in moves:
            changed[move.units] = move.device
        state, now = self._state_of(changed), self._state
        most = min(self._most, now.score.risk + len(moves) * NOISE * self._unit)
        if (
            state.pieces < now.pieces
            and state.score.excess <= now.score.excess
            and state.score.risk <= max(most, now.score.risk)
        ):
            self.choice, self._state = changed, state
            return True
        if len(moves) == 1:
            return False
        half = len(moves) // 2
        first = self.attempt(moves[:half])
        return self.attempt(moves[half:]) or first


def _possible(problem: Problem, choice: Ints, moves: Iterator[tuple[Ints, int]]) -> list[_Move]:
    """Returns the moves of nodes that the constraints allow, those that move least first."""
    simulator = problem.simulator
    seconds = simulator.costs.forward + simulator.costs.backward
    found = list[tuple[float, _Move]]()
    for nodes, device in moves:
        units = np.unique(problem.units[nodes])
        if problem.allowed[units, device].all() and (choice[units] != device).any():
            found.append((float(seconds[nodes].sum()), _Move(units, device)))
    return [move for _, move in sorted(found, key=lambda each: each[0])]


def _computed(problem: Problem) -> Ints:
    """Returns the nodes that compute something in a micro-batch, in their order."""
    costs = problem.simulator.costs
    stored = np.zeros(len(costs.forward), dtype=bool)
    stored[costs.makers[costs.stored]] = True
    return np.flatnonzero(~stored | (costs.forward > 0))


def _members(labels: Ints) -> Iterator[Ints]:
    """Returns the nodes of each label, by labels."""
    order = np.argsort(labels, kind="stable")
    return iter(np.split(order, np.flatnonzero(np.diff(labels[order])) + 1))


def _islands(problem: Problem, placed: Ints) -> Ints:
    """Returns the island of each node: what readings on one device connect, by its first node."""
    costs = problem.simulator.costs
    root: list[int] = list(range(len(placed)))

    def find(node: int) -> int:
        while root[node] != node:
            root[node] = root[root[node]]
            node = root[node]
        return node

    makers = costs.makers[costs.values]
    here: Bools = placed[makers] == placed[costs.readers]
    for maker, reader in zip(makers[here].tolist(), costs.readers[here].tolist(), strict=True):
        one, other = sorted((find(maker), find(reader)))
        root[other] = one
    return np.array([find(node) for node in range(len(placed))], dtype=np.intp)


def _to_most(
    problem: Problem, placed: Ints, ones: Ints, others: Ints
) -> Iterator[tuple[Ints, int]]:
    """Returns islands, each with the device that has most of its neighbours elsewhere."""
    islands = _islands(problem, placed)
    votes = np.zeros((len(placed), problem.simulator.devices), dtype=np.intp)
    apart = placed[ones] != placed[others]
    np.add.at(votes, (islands[ones[apart]], placed[others[apart]]), 1)
    np.add.at(votes, (islands[others[apart]], placed[ones[apart]]), 1)
    for nodes in _members(islands):
        row = votes[islands[nodes[0]]]
        if row.any():
            yield nodes, int(row.argmax())


def _islands_by_readings(problem: Problem, choice: Ints) -> Iterator[tuple[Ints, int]]:
    costs = problem.simulator.costs
    makers = costs.makers[costs.values]
    return _to_most(problem, choice[problem.units], makers, costs.readers)


def _islands_by_order(problem: Problem, choice: Ints) -> Iterator[tuple[Ints, int]]:
    order = _computed(problem)
    return _to_most(problem, choice[problem.units], order[:-1], order[1:])


def _runs(problem: Problem, placed: Ints) -> tuple[list[Ints], list[int]]:
    """Returns the runs of the order on one device, with what only they read, and the devices."""
    costs = problem.simulator.costs
    order = _computed(problem)
    if not len(order):
        return [], []
    run = np.full(len(placed), -1, dtype=np.intp)
    run[order] = np.concatenate([[0], (placed[order][1:] != placed[order][:-1]).cumsum()])
    count = int(run.max()) + 1
    makers = costs.makers[costs.values]
    least = np.full(len(placed), count, dtype=np.intp)
    most = np.full(len(placed), -1, dtype=np.intp)
    np.minimum.at(least, makers, run[costs.readers])
    np.maximum.at(most, makers, run[costs.readers])
    own = (run < 0) & (least == most)
    run[own] = least[own]
    nodes = [each for each in _members(run) if run[each[0]] >= 0]
    devices = placed[order][np.unique(run[order], return_index=True)[1]]
    return nodes, devices.tolist()


def _runs_after(problem: Problem, choice: Ints) -> Iterator[tuple[Ints, int]]:
    runs, devices = _runs(problem, choice[problem.units])
    return zip(runs[1:], devices[:-1], strict=True)


def _runs_before(problem: Problem, choice: Ints) -> Iterator[tuple[Ints, int]]:
    runs, devices = _runs(problem, choice[problem.units])
    return zip(runs[:-1], devices[1:], strict=True)
