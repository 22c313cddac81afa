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


def earliest_task_first(problem: Problem) -> Ints:
    """Returns the choice of m-ETF: again and again the node and device that can begin earliest.

    Of equal ones it takes the node with the longest path to the end. A unit is placed as a whole,
    with all its bytes, when its first node is; where it fits nowhere, on the allowed device with
    the most room.
    """
    simulator, units = problem.simulator, problem.units
    sizes = problem.unit_bytes[units]
    seconds = simulator.costs.forward + simulator.costs.backward
    count, devices = len(units), simulator.devices
    readers, inputs, to_end = _paths(problem, seconds)
    order = np.lexsort((np.arange(count), -to_end))  # the most urgent first
    row = np.argsort(order)
    arrived = np.full((count, devices), np.inf)  # when the data of the nodes of `order` are there
    opened = np.zeros(count, dtype=bool)
    waiting = [len(each) for each in inputs]
    ended, free, room = np.zeros(count), np.zeros(devices), simulator.limits.copy()
    choice = np.full(len(problem.allowed), -1, dtype=np.intp)
    shared = np.bincount(units) > 1

    def offer(node: int) -> None:
        """Offers a node, whose inputs are placed, to the devices on which it may be."""
        own, allowed = choice[units[node]], problem.allowed[units[node]]
        possible = np.arange(devices) == own if own >= 0 else allowed & (room >= sizes[node])
        opened[node], arrived[row[node]] = True, np.inf
        for device in np.flatnonzero(possible):
            arrived[row[node], device] = max(
                (
                    ended[maker] + (away if choice[units[maker]] != device else 0.0)
                    for maker, away in inputs[node].items()
                ),
                default=0.0,
            )

    for node in range(count):
        if not waiting[node]:
            offer(node)
    for _ in range(count):
        begins = np.maximum(arrived, free)
        at, device = divmod(int(begins.argmin()), devices)
        node, fits = int(order[at]), np.isfinite(begins[at, device])
        if not fits:
            node = int(np.flatnonzero(opened)[row[opened].argmin()])
            allowed = problem.allowed[units[node]]
            device = int(np.where(allowed, room, -np.inf).argmax())
        if choice[units[node]] < 0:
            choice[units[node]] = device
            room[device] -= sizes[node]
            if shared[units[node]] or np.isfinite(room[device]):
                full = (sizes > room[device]) & np.isfinite(arrived[row, device])
                for each in np.flatnonzero(opened & (full | (units == units[node]))).tolist():
                    offer(each)
        free[device] = ended[node] = max(arrived[row[node], device], free[device]) + seconds[node]
        opened[node], arrived[row[node]] = False, np.inf
        for reader in readers[node]:
            waiting[reader] -= 1
            if not waiting[reader]:
                offer(reader)
    return choice


def _paths(
    problem: Problem, seconds: Floats
) -> tuple[list[list[int]], list[dict[int, float]], Floats]:
    """Returns who reads each node, its inputs, and the longest path from its beginning to the end.

    Inputs are with the seconds to another device and back, over an average link, as paths are.
    """
    simulator, costs = problem.simulator, problem.simulator.costs
    devices = simulator.devices
    links = [link for at, link in enumerate(simulator.links) if at // devices != at % devices]
    readers: list[list[int]] = [[] for _ in seconds]
    inputs: list[dict[int, float]] = [{} for _ in seconds]
    for value, reader in zip(costs.values.tolist(), costs.readers.tolist(), strict=True):
        maker, size = int(costs.makers[value]), float(costs.sizes[value])
        took = sum(link.seconds(size) for link in links) / max(len(links), 1)
        if maker not in inputs[reader]:
            readers[maker].append(reader)
        ways = 1 + int(costs.differentiable[value])
        inputs[reader][maker] = inputs[reader].get(maker, 0.0) + ways * took
    to_end = seconds.copy()
    for node in reversed(range(len(seconds))):
        rest = (to_end[reader] + inputs[reader][node] for reader in readers[node])
        to_end[node] += max(rest, default=0.0)
    return readers, inputs, to_end
