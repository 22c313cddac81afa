"""What placing a model needs to know: its operations and their costs, devices, links, wishes.

Nothing here knows a framework: `CostGraph` comes from a captured model, or from a test.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from trireme.errors import ConfigurationError, suggestion

Schedule = Literal["gpipe", "1f1b"]
"""In which order a device executes micro-batches: all forward and then all backward, as Huang et
al., GPipe (NeurIPS 2019), or each backward as soon as possible, as Narayanan et al., PipeDream
(SOSP 2019), so that less of them are on their way at a time."""

Devices = Mapping[str, str]
"""The name of the device of each operation, by the operation's name: a placement."""


@dataclass(frozen=True)
class Operation:
    """What one operation costs for one micro-batch, on a device of speed 1."""

    name: str  # unique in the graph
    inputs: tuple[str, ...] = ()  # the names of the operations whose values it reads
    forward_seconds: float = 0.0  # the duration of its forward computation
    backward_seconds: float = 0.0  # the duration of its backward computation
    # parameters, their gradients and optimizer state, which lie where the operation is placed, once
    # for all micro-batches
    resident_bytes: int = 0
    # what lies there from the operation's forward to its backward computation, its output included
    # if that is kept
    activation_bytes: int = 0
    # its value, which goes to every other device on which an operation reads it
    output_bytes: int = 0
    # whether a gradient of the value, as large as the value, comes back from each of them. Data,
    # masks and indices have none
    differentiable: bool = True
    # whether it is a parameter or buffer, which is there before the step. It reads nothing and
    # computes nothing; its value is sent once, as the step begins, and its gradient once; its
    # backward computation is the optimizer's update, once at the end
    stored: bool = False
    # what adding the gradients of the parameters that it reads to those of the micro-batches before
    # takes; the first micro-batch has none before
    accumulation_seconds: float = 0.0


@dataclass(frozen=True)
class CostGraph:
    """The operations of a model in topological order: the order in which devices execute them."""

    operations: tuple[Operation, ...]  # each after those that it reads
    # what each segment (the operations that a device executes without waiting) takes besides them,
    # in each direction, on a device of speed 1
    segment_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.segment_seconds) and self.segment_seconds >= 0):
            raise ValueError(f"a segment cannot take {self.segment_seconds} s")
        known = set[str]()
        for operation in self.operations:
            if operation.name in known:
                raise ValueError(f"two operations are named {operation.name!r}")
            late = [name for name in operation.inputs if name not in known]
            if late:
                raise ValueError(f"{operation.name!r} reads {late[0]!r}, which is not before it")
            seconds = (
                operation.forward_seconds,
                operation.backward_seconds,
                operation.accumulation_seconds,
            )
            sizes = (
                operation.resident_bytes,
                operation.activation_bytes,
                operation.output_bytes,
            )
            if not all(math.isfinite(cost) and cost >= 0 for cost in (*seconds, *sizes)):
                raise ValueError(f"a cost of {operation.name!r} is negative or not finite")
            if operation.stored and (operation.inputs or operation.forward_seconds):
                raise ValueError(f"{operation.name!r} is stored, and cannot be computed")
            known.add(operation.name)

    @cached_property
    def positions(self) -> Mapping[str, int]:
        """The place of each operation in the order, by its name."""
        return {operation.name: place for place, operation in enumerate(self.operations)}


@dataclass(frozen=True)
class Device:
    """Something that computes one operation at a time."""

    name: str  # unique among the devices
    # relative to the device on which the costs were measured: 2 takes half the time
    speed: float = 1.0
    memory_bytes: int | None = None  # how much it can hold; None for no limit

    def __post_init__(self) -> None:
        if not (math.isfinite(self.speed) and self.speed > 0):
            raise ConfigurationError(f"device {self.name}: a speed of {self.speed} is not positive")
        if self.memory_bytes is not None and self.memory_bytes <= 0:
            raise ConfigurationError(
                f"device {self.name}: a memory limit of {self.memory_bytes} bytes is not positive"
            )


@dataclass(frozen=True)
class Link:
    """One direction between two devices. It carries one transfer at a time."""

    latency_seconds: float = 0.0  # what each transfer takes whatever its size
    bytes_per_second: float = math.inf  # the bandwidth; infinite by default
    # for how long each transfer, whatever its size, keeps the processor of each side from computing
    work_seconds: float = 0.0
    work_byte_seconds: float = 0.0  # likewise for each byte, which both sides copy

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency_seconds) and self.latency_seconds >= 0):
            raise ConfigurationError(f"a link's latency of {self.latency_seconds} s is impossible")
        if not self.bytes_per_second > 0:
            raise ConfigurationError(
                f"a link's bandwidth of {self.bytes_per_second} bytes/s is not positive"
            )
        for work in (self.work_seconds, self.work_byte_seconds):
            if not (math.isfinite(work) and work >= 0):
                raise ConfigurationError(f"a transfer cannot keep a processor for {work} s")

    def seconds(self, size: float) -> float:
        """Returns how long a transfer of that many bytes occupies the link."""
        return self.latency_seconds + size / self.bytes_per_second

    def work(self, size: float) -> float:
        """Returns for how long a transfer of that many bytes occupies the processor of a side."""
        return self.work_seconds + size * self.work_byte_seconds


@dataclass(frozen=True)
class Hardware:
    """The devices, and the links between any two of them."""

    devices: tuple[Device, ...]  # at least one; each has a number, its place here
    # the link between two devices that `links` does not name
    link: Link = field(default_factory=Link)
    # other links, by the names of the sender and the receiver. One that is named in one direction
    # only holds for both
    links: Mapping[tuple[str, str], Link] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.devices:
            raise ConfigurationError("a graph cannot be placed: there are no devices")
        if len(self.numbers) < len(self.devices):
            names = ", ".join(device.name for device in self.devices)
            raise ConfigurationError(f"two devices have one name: {names}")
        for pair in self.links:
            for name in pair:
                self.number(name)

    @cached_property
    def numbers(self) -> Mapping[str, int]:
        """The number of each device, by its name."""
        return {device.name: number for number, device in enumerate(self.devices)}

    def number(self, name: str) -> int:
        """Returns the number of a device."""
        if name not in self.numbers:
            names = ", ".join(self.numbers)
            raise ConfigurationError(
                f"unknown device {name!r}{suggestion(name, self.numbers)}: there are {names}"
            )
        return self.numbers[name]

    def between(self, sender: int, receiver: int) -> Link:
        """Returns the link from one device to another, given their numbers."""
        here, there = self.devices[sender].name, self.devices[receiver].name
        return self.links.get((here, there), self.links.get((there, here), self.link))


@dataclass(frozen=True)
class Constraints:
    """What a placement must respect."""

    # the device of an operation, for operations that may be nowhere else
    pinned: Devices = field(default_factory=dict)
    # groups of operations that share a device, such as those that share a parameter. Groups that
    # overlap are one group
    together: tuple[tuple[str, ...], ...] = ()
    # the devices on which an operation may not be
    never: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
