"""List scheduling under memory limits: the algorithm m-ETF of Baechi.

Beomyeol Jeon et al., "Baechi: Fast Device Placement of Machine Learning Graphs", SoCC 2020. It
places one node after the other, in the order in which a list scheduler would begin them, and leaves
out devices without room for it. A node stands for its forward and its backward computation, and a
transfer for both ways.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from trireme.graph.place.cost_arrays import Ints
from trireme.graph.place.problem import Problem


def earliest_task_first(problem: Problem) -> Ints:
    """Returns the choice of m-ETF: again and again the node and device that can begin earliest.

    Of equal ones it takes the node with the longest path to the end. A unit is placed as a whole,
    with all its bytes, when its first node is; where it fits nowhere, on the allowed device with
    the most room.
    """
    return _ListScheduler(problem).schedule()


class _ListScheduler:
    """Places nodes one after the other; see `earliest_task_first`."""

    def __init__(self, problem: Problem) -> None:
        self._tasks = _Tasks(problem)
        self._devices = range(problem.simulator.devices)
        self._units: list[int] = problem.units.tolist()
        self._allowed: list[list[bool]] = problem.allowed.tolist()
        self._sizes: list[float] = problem.unit_bytes.tolist()
        self._room: list[float] = problem.simulator.limits.tolist()
        self._chosen = [-1] * len(problem.allowed)  # the device of each unit
        self._ended = [0.0] * len(self._units)
        self._queues = [_Queue(self._tasks.to_end) for _ in self._devices]
        self._open_on = [0] * len(self._units)  # in how many queues a node is

    def schedule(self) -> Ints:
        """Returns the device of each unit."""
        waiting = [len(inputs) for inputs in self._tasks.inputs]
        for node, count in enumerate(waiting):
            if not count:
                self._ready(node)
        for _ in self._units:
            node = self._place_next()
            for reader in self._tasks.between[node]:
                waiting[reader] -= 1
                if not waiting[reader]:
                    self._ready(reader)
        return np.array(self._chosen, dtype=np.intp)

    def _place_next(self) -> int:
        """Places the node that can begin earliest, and returns it."""
        offers = [offer for offer in map(self._offer, self._devices) if offer is not None]
        # A unit that fits nowhere may have come into the queue of a device that was asked before.
        begins, _, node, device = min(offers or filter(None, map(self._offer, self._devices)))
        if self._chosen[self._units[node]] < 0:
            self._choose(self._units[node], device)
        for queue in self._queues:
            queue.drop(node)
        self._ended[node] = self._queues[device].free = begins + self._tasks.seconds[device][node]
        return node

    def _offer(self, device: int) -> tuple[float, float, int, int] | None:
        """Returns the node that a device can begin next, in the order of preference."""
        queue = self._queues[device]
        while (first := queue.first()) is not None:
            begins, node = first
            if self._fits(node, device):
                return begins, -self._tasks.to_end[node], node, device
            queue.drop(node)
            self._open_on[node] -= 1
            if not self._open_on[node]:
                self._settle(node)
        return None

    def _ready(self, node: int) -> None:
        """Puts a node, whose inputs are placed, into the queues of all devices that it fits."""
        possible = [device for device in self._devices if self._fits(node, device)]
        for device in possible:
            self._queues[device].add(node, self._arrival(node, device))
        self._open_on[node] = len(possible)
        if not possible:
            self._settle(node)

    def _settle(self, node: int) -> None:
        """Gives a unit that fits nowhere a device, which it will exceed."""
        unit = self._units[node]
        if self._chosen[unit] < 0:
            able = [device for device in self._devices if self._allowed[unit][device]]
            self._choose(unit, max(able, key=self._room.__getitem__))
        device = self._chosen[unit]
        self._queues[device].add(node, self._arrival(node, device))
        self._open_on[node] = 1

    def _choose(self, unit: int, device: int) -> None:
        self._chosen[unit] = device
        self._room[device] -= self._sizes[unit]

    def _fits(self, node: int, device: int) -> bool:
        unit = self._units[node]
        if self._chosen[unit] >= 0:
            return self._chosen[unit] == device
        return self._allowed[unit][device] and self._room[device] >= self._sizes[unit]

    def _arrival(self, node: int, device: int) -> float:
        """Returns when the inputs of a node are on a device."""
        return max(
            (
                self._ended[maker]
                + (
                    0.0
                    if self._chosen[self._units[maker]] == device
                    else self._tasks.between[maker][node]
                )
                for maker in self._tasks.inputs[node]
            ),
            default=0.0,
        )


class _Queue:
    """The nodes that may come next on one device.

    Attributes:
        arrivals: when the data of each node are there.
        free: when the device has computed what it has.
    """

    def __init__(self, to_end: list[float]) -> None:
        self.arrivals = dict[int, float]()
        self.free = 0.0
        self._to_end = to_end
        self._present = list[tuple[float, int]]()  # by the longest path to the end
        self._coming = list[tuple[float, float, int]]()  # by arrival

    def add(self, node: int, arrival: float) -> None:
        """Adds a node."""
        self.arrivals[node] = arrival
        heappush(self._coming, (arrival, -self._to_end[node], node))

    def drop(self, node: int) -> None:
        """Removes a node, if it is there."""
        self.arrivals.pop(node, None)

    def first(self) -> tuple[float, int] | None:
        """Returns when the device can begin the next node, and the node; None if it has none."""
        while self._coming and self._coming[0][0] <= self.free:
            _, urgency, node = heappop(self._coming)
            heappush(self._present, (urgency, node))
        while self._present and self._present[0][1] not in self.arrivals:
            heappop(self._present)
        if self._present:
            return self.free, self._present[0][1]
        while self._coming and self._coming[0][2] not in self.arrivals:
            heappop(self._coming)
        return (self._coming[0][0], self._coming[0][2]) if self._coming else None


class _Tasks:
    """Nodes with their durations, and the seconds between each and its readers elsewhere.

    Attributes:
        seconds: of each device and node.
        between: for each node the seconds to each reader, over an average link, both ways.
        inputs: the nodes that each node reads.
        to_end: the longest path from the beginning of each node to the end, with communication.
    """

    def __init__(self, problem: Problem) -> None:
        simulator = problem.simulator
        costs, devices = simulator.costs, simulator.devices
        duration = simulator.forward + simulator.backward
        self.seconds: list[list[float]] = duration.tolist()
        mean: list[float] = duration.mean(axis=0).tolist()
        links = [
            simulator.links[one * devices + other]
            for one in range(devices)
            for other in range(devices)
            if one != other
        ]
        count = len(mean)
        self.between: list[dict[int, float]] = [{} for _ in range(count)]
        self.inputs: list[list[int]] = [[] for _ in range(count)]
        for value, reader in zip(costs.values.tolist(), costs.readers.tolist(), strict=True):
            maker = int(costs.makers[value])
            ways = 2 if costs.differentiable[value] else 1
            size = float(costs.sizes[value])
            seconds = ways * sum(link.seconds(size) for link in links) / max(len(links), 1)
            if reader not in self.between[maker]:
                self.inputs[reader].append(maker)
            self.between[maker][reader] = self.between[maker].get(reader, 0.0) + seconds
        self.to_end = [0.0] * count
        for node in reversed(range(count)):
            rest = [self.to_end[reader] + each for reader, each in self.between[node].items()]
            self.to_end[node] = mean[node] + max(rest, default=0.0)
