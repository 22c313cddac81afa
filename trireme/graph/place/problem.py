"""A graph to place with its constraints, and the same graph with operations fused."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from trireme.errors import ConfigurationError
from trireme.graph.place.costs import (
    Bools,
    Constraints,
    CostGraph,
    Costs,
    Floats,
    Hardware,
    Ints,
    merged,
)
from trireme.graph.place.simulation import Score, Simulator


@dataclass(frozen=True, eq=False)
class Problem:
    """Which device for which unit: nodes that must be together, or one node alone.

    A *choice* is the number of the device of each unit.
    """

    simulator: Simulator  # executes placements of the nodes
    units: Ints  # the unit of each node
    allowed: Bools  # whether a unit (row) may be on a device (column)
    _scores: dict[bytes, Score] = field(default_factory=dict, init=False, repr=False)

    @property
    def weights(self) -> Floats:
        """The share of each node in all seconds plus its share in all bytes."""
        costs, held = self.simulator.costs, self.simulator.held
        seconds: Floats = costs.forward + costs.backward
        weights: Floats = seconds / max(seconds.sum(), 1e-300) + held / max(held.sum(), 1.0)
        return weights

    def score(self, choice: Ints) -> Score:
        """Returns how good a choice is.

        The scores of earlier choices are kept: the algorithms ask for many of them several times,
        and for 5,000 operations a score takes 10 ms.
        """
        key = choice.tobytes()
        if key not in self._scores:
            self._scores[key] = self.simulator.score(self.simulator.parts(choice[self.units]))
        return self._scores[key]

    def nearest_choice(self, placed: Ints) -> Ints:
        """Returns the choice closest to a placement of nodes that may break the constraints.

        Each unit goes to the allowed device that has the largest part of it, by `weights`.
        """
        votes = np.zeros(self.allowed.shape)
        np.add.at(votes, (self.units, placed), self.weights + 1e-12)
        votes[~self.allowed] = -1.0
        choice: Ints = votes.argmax(axis=1)
        return choice


def problem_of(
    graph: CostGraph, hardware: Hardware, constraints: Constraints, micro_batches: int
) -> Problem:
    """Returns the problem of placing each operation of a graph, if the constraints allow one."""
    places, count, devices = graph.positions, len(graph.operations), len(hardware.devices)
    allowed = np.ones((count, devices), dtype=bool)
    for name, device in constraints.pinned.items():
        allowed[places[name]] &= np.arange(devices) == hardware.numbers[device]
    for name, banned in constraints.never.items():
        allowed[places[name], [hardware.numbers[device] for device in banned]] = False
    roots = np.arange(count)
    for group in merged(constraints.together):
        together = [places[name] for name in group]
        roots[together] = min(together)
    first, units = np.unique(roots, return_inverse=True)
    common = np.ones((len(first), devices), dtype=bool)
    np.logical_and.at(common, units, allowed)
    if (lost := np.flatnonzero(~common.any(axis=1))).size:
        members = np.flatnonzero(units == lost[0])
        names = ", ".join(repr(graph.operations[member].name) for member in members[:3])
        more = " and others, which must be together," if len(members) > 3 else ""
        raise ConfigurationError(f"the constraints leave no device for {names}{more}")
    simulator = Simulator(Costs.of(graph), hardware, micro_batches)
    return Problem(simulator, units.astype(np.intp), common)


def coarsened(problem: Problem, target: int) -> tuple[Problem, Ints]:
    """Fuses operations until about `target` nodes are left.

    Each node of the result is a run of a topological order, so that the result has no cycle. The
    order is depth-first from the last operations back through their inputs: a branch is a run in
    it, and so is a chain. Only what constraints treat alike is fused.
    """
    costs = problem.simulator.costs
    count = len(costs.forward)
    if count <= target:
        return problem, np.arange(count, dtype=np.intp)
    order = _depth_first(costs)
    limit, runs = 0.5 / target, np.arange(count, dtype=np.intp)
    for attempt in range(14):
        runs = _runs(problem, order, limit, connected=attempt < 4)
        if runs.max() < target:
            break
        limit *= 1.6
    return _quotient(problem, runs), runs


def _inputs(costs: Costs) -> list[list[int]]:
    inputs: list[list[int]] = [[] for _ in costs.forward]
    makers = costs.makers[costs.values].tolist()
    for maker, reader in zip(makers, costs.readers.tolist(), strict=True):
        inputs[reader].append(maker)
    return inputs


def _depth_first(costs: Costs) -> list[int]:
    inputs, order = _inputs(costs), list[int]()
    seen = [False] * len(inputs)
    read = {maker for makers in inputs for maker in makers}
    stack = [node for node in reversed(range(len(inputs))) if node not in read]
    while stack:
        node = stack.pop()
        if node < 0:  # all before it are in the order
            order.append(~node)
        elif not seen[node]:
            seen[node] = True
            stack += [~node, *reversed(inputs[node])]
    return order


def _runs(problem: Problem, order: list[int], limit: float, connected: bool) -> Ints:
    """Returns the run of each node: as long as its weight stays below a limit."""
    costs = problem.simulator.costs
    inputs, weights = _inputs(costs), problem.weights.tolist()
    readers = np.bincount(costs.makers[costs.values], minlength=len(weights)).tolist()
    units = problem.units.tolist()
    shared = (np.bincount(problem.units) > 1)[problem.units].tolist()
    allowed = [row.tobytes() for row in problem.allowed[problem.units]]
    runs = np.zeros(len(order), dtype=np.intp)
    run, begins, weight, unit = 0, 0, 0.0, -1
    place = {node: at for at, node in enumerate(order)}
    for at, node in enumerate(order):
        own = units[node] if shared[node] else -1
        if at:
            joined = any(place[maker] >= begins for maker in inputs[node])
            # A fork or a join is a good place to end a run that is long enough.
            bent = readers[order[at - 1]] != 1 or inputs[node] != [order[at - 1]]
            if (
                allowed[node] != allowed[order[at - 1]]
                or (own != unit and own >= 0 and unit >= 0)
                or weight + weights[node] > limit
                or (bent and weight > limit / 2)
                or (connected and not joined)
            ):
                run, begins, weight, unit = run + 1, at, 0.0, -1
        runs[node] = run
        weight += weights[node]
        unit = max(unit, own)
    return runs


_SUMMED = ("forward", "backward", "update", "resident", "activation")


def _quotient(problem: Problem, runs: Ints) -> Problem:
    """Returns the problem whose nodes are runs of nodes."""
    costs = problem.simulator.costs
    count = int(runs.max()) + 1
    makers = runs[costs.makers]
    pairs = np.stack([costs.values, runs[costs.readers]])
    pairs = np.unique(pairs[:, makers[pairs[0]] != pairs[1]], axis=1)
    kept = np.unique(pairs[0])
    kept = kept[np.argsort(makers[kept], kind="stable")]
    number = np.zeros(len(makers), dtype=np.intp)
    number[kept] = np.arange(len(kept))
    values = number[pairs[0]]
    sort = np.lexsort((values, pairs[1]))
    working = np.zeros(count)
    np.maximum.at(working, runs, costs.working)

    def total(each: Floats) -> Floats:
        return np.bincount(runs, each, count).astype(np.float64)

    totals: dict[str, Any] = {name: total(getattr(costs, name)) for name in _SUMMED}
    fused = replace(
        costs,
        **totals,
        working=working,
        makers=makers[kept],
        sizes=costs.sizes[kept],
        differentiable=costs.differentiable[kept],
        stored=costs.stored[kept],
        values=values[sort],
        readers=pairs[1][sort],
    )
    # Units of several nodes stay units; a run holds nodes of one of them at most.
    shared = (np.bincount(problem.units) > 1)[problem.units]
    label = len(problem.allowed) + np.arange(count, dtype=np.intp)
    label[runs[shared]] = problem.units[shared]
    units = np.unique(label, return_inverse=True)[1].astype(np.intp)
    allowed = np.zeros((int(units.max()) + 1, problem.allowed.shape[1]), dtype=bool)
    allowed[units[runs]] = problem.allowed[problem.units]
    whole = problem.simulator
    simulator = Simulator(fused, whole.hardware, whole.micro_batches)
    return Problem(simulator, units, allowed)
