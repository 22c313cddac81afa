"""Simple placements: baselines, and where local search begins."""

from __future__ import annotations

import numpy as np

from trireme.graph.place.costs import Floats, Ints
from trireme.graph.place.problem import Problem


def round_robin(problem: Problem) -> Ints:
    """Returns the units in topological order on one allowed device after the other."""
    _, first = np.unique(problem.units, return_index=True)
    choice = np.zeros(len(problem.allowed), dtype=np.intp)
    turn = 0
    for unit in np.argsort(first, kind="stable"):
        while not problem.allowed[unit, turn]:
            turn = (turn + 1) % problem.simulator.devices
        choice[unit] = turn
        turn = (turn + 1) % problem.simulator.devices
    return choice


def contiguous_cuts(problem: Problem) -> list[Ints]:
    """Returns cuts of the order into one section for each of the first 1, 2, ... devices.

    Dynamic programming over (end of the section, device) minimises the seconds of the busiest
    device: its computation, and sending to it what crosses the cut before it, both ways. Sections
    above a memory limit cost so much that they are taken only where nothing fits.
    """
    simulator = problem.simulator
    count = len(problem.units)
    seconds = (simulator.costs.forward + simulator.costs.backward).cumsum()
    seconds = np.concatenate([[0.0], seconds])
    held = np.concatenate([[0.0], simulator.held.cumsum()])
    crossing = _crossing(problem)
    dear = 10 * float(seconds[-1]) / max(float(held[-1]), 1.0)
    best = np.full(count + 1, np.inf)
    best[0] = 0.0
    cuts: list[Ints] = []
    placements = []
    for device in range(simulator.devices):
        after = np.full(count + 1, np.inf)
        cut = np.zeros(count + 1, dtype=np.intp)
        limit = simulator.limits[device]
        for end in range(count + 1):
            begins = slice(0, end + 1)
            over = np.maximum(held[end] - held[begins] - limit, 0.0)
            cost = seconds[end] - seconds[begins] + crossing[begins]
            worst = np.maximum(best[begins], cost + dear * over)
            cut[end] = worst.argmin()
            after[end] = worst[cut[end]]
        best = after
        cuts.append(cut)
        placed, end = np.zeros(count, dtype=np.intp), count
        for back in range(device, -1, -1):
            placed[cuts[back][end] : end] = back
            end = int(cuts[back][end])
        placements.append(problem.nearest_choice(placed))
    return placements


def _crossing(problem: Problem) -> Floats:
    """Returns the seconds in which all that crosses a cut before each node is sent, both ways."""
    simulator, costs = problem.simulator, problem.simulator.costs
    last = np.zeros(len(costs.makers), dtype=np.intp)
    np.maximum.at(last, costs.values, costs.readers)
    link = simulator.links[min(1, len(simulator.links) - 1)]
    ways = 1 + costs.differentiable
    each = ways * (link.latency_seconds + costs.sizes / link.bytes_per_second)
    change = np.zeros(len(problem.units) + 2)
    read = last > costs.makers
    np.add.at(change, costs.makers[read] + 1, each[read])
    np.add.at(change, last[read] + 1, -each[read])
    crossing: Floats = change.cumsum()[:-1]
    crossing[0] = 0.0
    return crossing
