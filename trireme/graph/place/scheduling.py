"""List scheduling under memory limits: the algorithm m-ETF of Baechi.

Beomyeol Jeon et al., "Baechi: Fast Device Placement of Machine Learning Graphs", SoCC 2020. It
places one node after the other, in the order in which a list scheduler would begin them, and leaves
out devices without room for it. A node stands for its forward and its backward computation, and a
transfer for both ways.
"""

from __future__ import annotations

import numpy as np

from trireme.graph.place.costs import Floats, Ints
from trireme.graph.place.problem import Problem


def earliest_task_first(problem: Problem) -> Ints:
    """Returns the choice of m-ETF: again and again the node and device that can begin earliest.

    Of equal ones it takes the node with the longest path to the end. A unit is placed as a whole,
    with all its bytes, when its first node is; where it fits nowhere, on the allowed device with
    the most room.
    """
    simulator, units = problem.simulator, problem.units
    sizes, seconds = problem.unit_bytes[units], simulator.forward + simulator.backward
    count, devices = len(units), simulator.devices
    readers, inputs, to_end = _paths(problem, seconds.mean(axis=0))
    order = np.lexsort((np.arange(count), -to_end))  # the most urgent first
    row = np.argsort(order)
    arrived = np.full((count, devices), np.inf)  # when the data of the nodes of `order` are there
    opened = np.zeros(count, dtype=bool)
    waiting = [len(each) for each in inputs]
    ended, free, room = np.zeros(count), np.zeros(devices), simulator.limits.copy()
    choice = np.full(len(problem.allowed), -1, dtype=np.intp)

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
            full = (sizes > room[device]) & np.isfinite(arrived[row, device])
            for each in np.flatnonzero(opened & (full | (units == units[node]))).tolist():
                offer(each)
        free[device] = ended[node] = (
            max(arrived[row[node], device], free[device]) + seconds[device, node]
        )
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
