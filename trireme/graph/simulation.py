"""Simulates a training step of a placement; fast, as the search does it thousands of times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trireme.errors import ConfigurationError
from trireme.graph.costs import CostGraph, Hardware

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Costs:
    """A cost graph as arrays: nodes in topological order, the values that they make, who reads.

    A node is an operation or several fused ones. Then it may make several values; those that
    nobody outside reads are left out.

    Attributes:
        forward: seconds, for each node; `backward` likewise.
        resident: bytes, for each node; `activation` and `working` likewise.
        makers: the node that makes each value, ascending.
        sizes: the bytes of each value.
        differentiable: whether gradients of each value return.
        values: the value of each reading, ascending, and of one value by the reader.
        readers: the node that reads, another than the maker and after it.
    """

    forward: Floats
    backward: Floats
    resident: Floats
    activation: Floats
    working: Floats
    makers: Ints
    sizes: Floats
    differentiable: NDArray[np.bool_]
    values: Ints
    readers: Ints

    @staticmethod
    def of(graph: CostGraph) -> Costs:
        """Returns the arrays of a graph: node and value of an operation have its place."""
        operations, places = graph.operations, graph.positions
        sizes = np.array([each.output_bytes for each in operations], dtype=float)
        inputs = [sorted({places[name] for name in each.inputs}) for each in operations]
        readings = sorted((value, reader) for reader, read in enumerate(inputs) for value in read)
        values, readers = np.array(readings, dtype=np.intp).reshape(-1, 2).T
        return Costs(
            forward=np.array([each.forward_seconds for each in operations], dtype=float),
            backward=np.array([each.backward_seconds for each in operations], dtype=float),
            resident=np.array([each.resident_bytes for each in operations], dtype=float),
            activation=np.array([each.activation_bytes for each in operations], dtype=float),
            working=sizes + np.array([sizes[read].sum() for read in inputs], dtype=float),
            makers=np.arange(len(operations), dtype=np.intp),
            sizes=sizes,
            differentiable=np.array([each.differentiable for each in operations], dtype=bool),
            values=values.copy(),
            readers=readers.copy(),
        )


class Score(NamedTuple):
    """How good a placement is: smaller is better.

    Attributes:
        excess: the bytes above the limits, over all devices.
        seconds: the duration of a step.
    """

    excess: float
    seconds: float


class Transfer(NamedTuple):
    """A value that goes to another device.

    `reader` is the first that reads it there: later ones never wait for it, and its backward
    computation is the last, after which the gradient returns.
    """

    maker: int
    reader: int
    sender: int
    receiver: int
    size: float
    returns: bool


class _Event(NamedTuple):
    """A node that waits for transfers or makes some; what lies between them is only added up.

    `before` is what its device computes before it in one micro-batch, `receives` are numbers of
    transfers, `sends` are (number, link, seconds).
    """

    device: int
    before: float
    seconds: float
    receives: list[int]
    sends: list[tuple[int, int, float]]


class Simulator:
    """Executes placements of one graph by the rules of `trireme.graph.prediction.predict`.

    The effort grows with the readings that cross devices rather than with the nodes: between two
    nodes that exchange something a device only computes, and prefix sums say how long.

    Args:
        costs: the graph.
        hardware: the devices and links.
        micro_batches: of a step.

    Raises:
        ConfigurationError: there is not at least one micro-batch.
    """

    def __init__(self, costs: Costs, hardware: Hardware, micro_batches: int) -> None:
        if micro_batches < 1:
            raise ConfigurationError(f"{micro_batches} micro-batches: a step needs at least one")
        self.costs = costs
        self.hardware = hardware
        self.micro_batches = micro_batches
        self.devices = len(hardware.devices)
        numbers = range(self.devices)
        self.links = [hardware.between(one, other) for one in numbers for other in numbers]
        self.limits = np.array(
            [
                np.inf if device.memory_bytes is None else device.memory_bytes
                for device in hardware.devices
            ]
        )
        speeds = np.array([device.speed for device in hardware.devices])
        self.forward: Floats = costs.forward / speeds[:, None]
        self.backward: Floats = costs.backward / speeds[:, None]
        self.held: Floats = costs.resident + micro_batches * costs.activation
        self._nodes = np.arange(len(costs.forward))
        self._numbers = np.arange(self.devices)[:, None]
        self._reading_makers = costs.makers[costs.values]

    def transfers(self, placed: Ints) -> list[Transfer]:
        """Returns what goes from device to device for one micro-batch."""
        costs, receivers = self.costs, placed[self.costs.readers]
        cross = np.flatnonzero(placed[self._reading_makers] != receivers)
        # Readings are sorted, so the first with a value and a receiver is that of the first reader.
        first: dict[tuple[int, int], int] = {}
        for value, receiver, reader in zip(
            costs.values[cross].tolist(),
            receivers[cross].tolist(),
            costs.readers[cross].tolist(),
            strict=True,
        ):
            first.setdefault((value, receiver), reader)
        made = [value for value, _ in first]
        makers = costs.makers[made]
        return [
            Transfer(*each)
            for each in zip(
                makers.tolist(),
                first.values(),
                placed[makers].tolist(),
                [receiver for _, receiver in first],
                costs.sizes[made].tolist(),
                costs.differentiable[made].tolist(),
                strict=True,
            )
        ]

    def peak_bytes(self, placed: Ints, transfers: list[Transfer]) -> Floats:
        """Returns the most that each device holds at a time."""
        held: Floats = np.bincount(placed, self.held, self.devices).astype(np.float64)
        held += np.where(placed == self._numbers, self.costs.working, 0.0).max(axis=1, initial=0.0)
        for transfer in transfers:
            size = self.micro_batches * transfer.size
            held[transfer.receiver] += size
            if transfer.returns:
                held[transfer.sender] += size
        return held

    def step_seconds(self, placed: Ints, transfers: list[Transfer]) -> float:
        """Returns the duration of a step."""
        there = placed == self._numbers
        forward = np.where(there, self.forward, 0.0).cumsum(axis=1)
        backward = np.where(there, self.backward, 0.0)[:, ::-1].cumsum(axis=1)[:, ::-1]
        incoming: dict[int, list[int]] = {}
        outgoing: dict[int, list[int]] = {}
        for number, transfer in enumerate(transfers):
            outgoing.setdefault(transfer.maker, []).append(number)
            incoming.setdefault(transfer.reader, []).append(number)
        nodes = sorted(incoming.keys() | outgoing.keys())
        on = placed[nodes]

        def events(sums: Floats, seconds: Floats, back: bool) -> list[_Event]:
            took = seconds[on, nodes]
            before = sums[on, nodes] - took
            rows = zip(nodes, on.tolist(), before.tolist(), took.tolist(), strict=True)
            result = []
            for node, device, earlier, duration in rows:
                inward, outward = incoming.get(node, []), outgoing.get(node, [])
                if back:
                    inward, outward = outward, inward[::-1]
                    inward = [number for number in inward if transfers[number].returns]
                    outward = [number for number in outward if transfers[number].returns]
                sends = []
                for number in outward:
                    _, _, sender, receiver, size, _ = transfers[number]
                    if back:
                        sender, receiver = receiver, sender
                    link = sender * self.devices + receiver
                    sends.append((number, link, self.links[link].seconds(size)))
                result.append(_Event(device, earlier, duration, inward, sends))
            return result

        totals = (forward[:, -1:].ravel().tolist(), backward[:, :1].ravel().tolist())
        there_and_back = (
            (events(forward, self.forward, False), totals[0]),
            (events(backward, self.backward, True)[::-1], totals[1]),
        )
        return self._execute(there_and_back, len(transfers))

    def _execute(
        self, phases: tuple[tuple[list[_Event], list[float]], ...], transfers: int
    ) -> float:
        """Returns when the last device ends; a phase is its events and each device's seconds."""
        now = [0.0] * self.devices
        free = [0.0] * len(self.links)
        arrivals = [0.0] * transfers
        for events, totals in phases:
            for _ in range(self.micro_batches):
                done = [0.0] * self.devices
                for device, before, seconds, receives, sends in events:
                    time = now[device] + (before - done[device])
                    for number in receives:
                        if arrivals[number] > time:
                            time = arrivals[number]
                    time += seconds
                    now[device] = time
                    done[device] = before + seconds
                    for number, link, duration in sends:
                        begins = free[link] if free[link] > time else time
                        arrivals[number] = free[link] = begins + duration
                for device, total in enumerate(totals):
                    now[device] += total - done[device]
        return max(now)
