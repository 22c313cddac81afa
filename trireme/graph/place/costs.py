"""What placing a model needs to know: its operations and their costs, devices, links, wishes.

Nothing here knows a framework: `CostGraph` comes from a captured model, or from a test.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.intp]

Devices = Mapping[str, str]
"""The name of the device of each operation, by the operation's name: a placement."""


@dataclass(frozen=True)
class Operation:
    """What one operation costs for one micro-batch.

    A parameter or buffer is `stored`: it reads and computes nothing. Its value is sent once, as the
    step begins, and its gradient once; its backward computation is the optimizer's update, once at
    the end.
    """

    name: str
    inputs: tuple[str, ...] = ()  # the operations whose values it reads
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    resident_bytes: int = 0  # parameters, gradients and optimizer state, once for all micro-batches
    activation_bytes: int = 0  # kept from forward to backward, its output included if that is kept
    output_bytes: int = 0  # its value, which goes to every other device that reads it
    differentiable: bool = True  # whether a gradient, as large as the value, comes back from each
    stored: bool = False


@dataclass(frozen=True)
class CostGraph:
    """The operations of a model in topological order: the order in which devices execute them."""

    operations: tuple[Operation, ...]
    # what each segment (the operations that a device executes without waiting) takes besides them,
    # in each direction
    segment_seconds: float = 0.0

    @cached_property
    def positions(self) -> Mapping[str, int]:
        """The position of each operation in the order, by its name."""
        return {operation.name: number for number, operation in enumerate(self.operations)}


@dataclass(frozen=True)
class Device:
    """Something that computes one operation at a time."""

    name: str
    memory_bytes: int | None = None  # None for no limit


@dataclass(frozen=True)
class Link:
    """One direction between two devices. It carries one transfer at a time."""

    latency_seconds: float = 0.0
    bytes_per_second: float = math.inf
    work_seconds: float = 0.0  # how long a transfer keeps the processor of each side
    work_byte_seconds: float = 0.0  # likewise for each byte, which both sides copy

    def seconds(self, size: float) -> float:
        """Returns how long a transfer of that many bytes occupies the link."""
        return self.latency_seconds + size / self.bytes_per_second

    def work(self, size: float) -> float:
        """Returns for how long a transfer of that many bytes occupies the processor of a side."""
        return self.work_seconds + size * self.work_byte_seconds


@dataclass(frozen=True)
class Hardware:
    """The devices, each of which has a number, and the links between any two of them."""

    devices: tuple[Device, ...]
    link: Link = field(default_factory=Link)  # where `links` names none
    # by the names of sender and receiver; one that is named in one direction holds for both
    links: Mapping[tuple[str, str], Link] = field(default_factory=dict)

    @cached_property
    def numbers(self) -> Mapping[str, int]:
        """The number of each device, by its name."""
        return {device.name: number for number, device in enumerate(self.devices)}

    def between(self, sender: int, receiver: int) -> Link:
        """Returns the link from one device to another, given their numbers."""
        here, there = self.devices[sender].name, self.devices[receiver].name
        return self.links.get((here, there), self.links.get((there, here), self.link))


@dataclass(frozen=True)
class Constraints:
    """What a placement must respect."""

    pinned: Devices = field(default_factory=dict)  # operations that may be nowhere else
    together: tuple[tuple[str, ...], ...] = ()  # groups that share a device; overlaps are one group
    never: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # where one may not be


def merged(groups: Iterable[Iterable[str]]) -> list[set[str]]:
    """Returns groups of which no two have a member in common."""
    group_of: dict[str, set[str]] = {}
    for group in groups:
        names = set(group)
        names = names.union(*(group_of[name] for name in names if name in group_of))
        group_of.update(dict.fromkeys(sorted(names), names))
    return list({id(names): names for names in group_of.values()}.values())


@dataclass(frozen=True, eq=False)
class Costs:
    """A cost graph as arrays: nodes in topological order, the values that they make, who reads.

    A node is an operation or several fused ones. Then it may make several values; those that no
    other node reads are left out.
    """

    forward: Floats  # seconds, for each node
    backward: Floats
    update: Floats  # once at the end
    resident: Floats  # bytes, for each node
    activation: Floats
    working: Floats  # the largest sum of an operation's output and inputs
    makers: Ints  # the node that makes each value, ascending
    sizes: Floats  # the bytes of each value
    differentiable: Bools
    stored: Bools
    values: Ints  # the value of each reading
    readers: Ints  # the node that reads, ascending: another than the maker and after it
    segment_seconds: float = 0.0

    @staticmethod
    def of(graph: CostGraph) -> Costs:
        """Returns the arrays of a graph: node and value of an operation have its position."""
        operations, positions = graph.operations, graph.positions

        def column(name: str) -> Floats:
            return np.array([getattr(each, name) for each in operations], dtype=float)

        sizes, backward = column("output_bytes"), column("backward_seconds")
        inputs = [sorted({positions[name] for name in each.inputs}) for each in operations]
        readings = [(value, reader) for reader, read in enumerate(inputs) for value in read]
        values, readers = np.array(readings, dtype=np.intp).reshape(-1, 2).T
        stored = column("stored").astype(bool)
        return Costs(
            forward=column("forward_seconds"),
            backward=np.where(stored, 0.0, backward),
            update=np.where(stored, backward, 0.0),
            resident=column("resident_bytes"),
            activation=column("activation_bytes"),
            working=sizes + np.array([sizes[read].sum() for read in inputs], dtype=float),
            makers=np.arange(len(operations), dtype=np.intp),
            sizes=sizes,
            differentiable=column("differentiable").astype(bool),
            stored=stored,
            values=values.copy(),
            readers=readers.copy(),
            segment_seconds=graph.segment_seconds,
        )
