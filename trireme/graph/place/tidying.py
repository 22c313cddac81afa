"""Undoes what local search did for nothing: small pieces apart from their neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from trireme.graph.place.costs import Ints
from trireme.graph.place.problem import Problem, components
from trireme.graph.place.simulation import Score

NOISE = 0.002
"""Which share of the risk a piece on a device of its own must gain: less cannot be predicted."""

_ALL_NOISE = 0.005
"""Which share of the risk all moves together may cost."""

_TRANSFER = 3
"""How many changes of the device a transfer outweighs, where the order interleaves branches."""


class _Move(NamedTuple):
    seconds: float  # what is moved computes for so long
    units: Ints
    device: int


class _State(NamedTuple):
    choice: Ints
    score: Score
    pieces: int  # the segments, the changes of the device in the order, and thrice the transfers


def tidied(problem: Problem, choice: Ints, evaluations: int) -> Ints:
    """Returns a choice with fewer pieces that is as good, but for noise.

    Moves islands, and runs of the order, to the device of their neighbours, those with the least
    computation first, where that makes the number of pieces smaller. A move is refused where the
    risk grows by more than `NOISE`, or bytes above the limits are added. Many moves are tried at
    once, and where they are refused, each half of them.
    """
    state = _state_of(problem, choice)
    first, left = state.score.risk, evaluations
    improves = True
    while improves and left > 0:
        improves = False
        for kind in _KINDS:
            found = [
                _possible(problem, state.choice, *move) for move in kind(problem, state.choice)
            ]
            moves = sorted(filter(None, found), key=lambda move: move.seconds)
            open_ = [moves] if moves else []
            while open_ and left > 0:
                some, left = open_.pop(), left - 1
                changed = state.choice.copy()
                for move in some:
                    changed[move.units] = move.device
                after = _state_of(problem, changed)
                most = min(first * (1 + _ALL_NOISE), state.score.risk + len(some) * NOISE * first)
                if (
                    after.pieces < state.pieces
                    and after.score.excess <= state.score.excess
                    and after.score.risk <= max(most, state.score.risk)
                ):
                    state, improves = after, True
                elif len(some) > 1:
                    half = len(some) // 2
                    open_ += [some[half:], some[:half]]
    return state.choice


def _state_of(problem: Problem, choice: Ints) -> _State:
    simulator = problem.simulator
    parts = simulator.parts(choice[problem.units])
    order = parts.placed[_computed(problem)]
    changes = int(np.count_nonzero(order[1:] != order[:-1]))
    pieces = simulator.segments(parts) + changes + _TRANSFER * len(parts.transfers.sizes)
    return _State(choice, simulator.score(parts), pieces)


def _possible(problem: Problem, choice: Ints, nodes: Ints, device: int) -> _Move | None:
    units = np.unique(problem.units[nodes])
    if not problem.allowed[units, device].all() or (choice[units] == device).all():
        return None
    costs = problem.simulator.costs
    return _Move(float((costs.forward + costs.backward)[nodes].sum()), units, device)


def _computed(problem: Problem) -> Ints:
    costs = problem.simulator.costs
    stored = np.zeros(len(costs.forward), dtype=bool)
    stored[costs.makers[costs.stored]] = True
    return np.flatnonzero(~stored | (costs.forward > 0))


def _members(labels: Ints) -> Iterator[Ints]:
    order = np.argsort(labels, kind="stable")
    return iter(np.split(order, np.flatnonzero(np.diff(labels[order])) + 1))


def _islands(problem: Problem, choice: Ints, *, by_order: bool) -> Iterator[tuple[Ints, int]]:
    """Yields what readings on one device connect, with the device of most of its neighbours.

    Neighbours are what reads or is read, or what comes before or after in the order.
    """
    costs, placed, order = problem.simulator.costs, choice[problem.units], _computed(problem)
    makers = costs.makers[costs.values]
    here = placed[makers] == placed[costs.readers]
    pairs = zip(makers[here].tolist(), costs.readers[here].tolist(), strict=True)
    islands = components(len(placed), pairs)
    ones, others = (order[:-1], order[1:]) if by_order else (makers, costs.readers)
    votes = np.zeros((len(placed), problem.simulator.devices), dtype=np.intp)
    apart = placed[ones] != placed[others]
    np.add.at(votes, (islands[ones[apart]], placed[others[apart]]), 1)
    np.add.at(votes, (islands[others[apart]], placed[ones[apart]]), 1)
    for nodes in _members(islands):
        row = votes[islands[nodes[0]]]
        if row.any():
            yield nodes, int(row.argmax())


def _runs(problem: Problem, choice: Ints, *, after: bool) -> Iterator[tuple[Ints, int]]:
    """Yields runs of the order on one device, with what only they read, and a device beside them.

    It is that of the run before, where they come `after` it, or of the one behind.
    """
    costs, placed, order = problem.simulator.costs, choice[problem.units], _computed(problem)
    if not len(order):
        return
    run = np.full(len(placed), -1, dtype=np.intp)
    run[order] = np.concatenate([[0], (placed[order][1:] != placed[order][:-1]).cumsum()])
    makers, count = costs.makers[costs.values], int(run.max()) + 1
    least = np.full(len(placed), count, dtype=np.intp)
    most = np.full(len(placed), -1, dtype=np.intp)
    np.minimum.at(least, makers, run[costs.readers])
    np.maximum.at(most, makers, run[costs.readers])
    own = (run < 0) & (least == most)
    run[own] = least[own]
    runs = [nodes for nodes in _members(run) if run[nodes[0]] >= 0]
    devices = placed[order][np.unique(run[order], return_index=True)[1]].tolist()
    one, other = slice(1, None), slice(-1)
    yield from zip(runs[one if after else other], devices[other if after else one], strict=True)


_KINDS = (
    partial(_islands, by_order=False),
    partial(_islands, by_order=True),
    partial(_runs, after=True),
    partial(_runs, after=False),
)
