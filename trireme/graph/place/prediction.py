"""Predicts the step time and the memory of a placement, by simulating a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trireme.errors import ConfigurationError, suggestion
from trireme.graph.place.cost_arrays import Costs, Ints
from trireme.graph.place.costs import CostGraph, Devices, Hardware, Schedule
from trireme.graph.place.simulation import Simulator, Transfers


@dataclass(frozen=True)
class DevicePrediction:
    """What one device does in a step."""

    device: str  # its name
    peak_bytes: int  # the most that it holds at a time
    busy_seconds: float  # how long it computes


@dataclass(frozen=True)
class Traffic:
    """What one link carries in a step, values and gradients, over all micro-batches."""

    sender: str  # the name of the device that sends
    receiver: str  # the name of the device that receives
    transfers: int  # their number
    total_bytes: int  # their sizes together
    busy_seconds: float  # how long they occupy the link


@dataclass(frozen=True)
class Prediction:
    """What a step of a placement costs."""

    step_seconds: float  # from the first computation to the end of the last
    devices: tuple[DevicePrediction, ...]  # in the order of the hardware's devices
    traffic: tuple[Traffic, ...]  # the links that carry something, by sender and receiver


def predict(
    graph: CostGraph,
    hardware: Hardware,
    placement: Devices,
    micro_batches: int = 1,
    schedule: Schedule = "gpipe",
) -> Prediction:
    """Predicts the duration of a step, and what devices and links do in it.

    The executor and this function follow the same rules:

    1. *Segments.* The depth of an operation is the largest number of transfers on a path to it, of
       values that are not `stored`. The operations of one device and one depth are a group. Its
       early segment are the operations whose values another device reads, and those of the group on
       which they depend; its late segment are all others, which are computed when the values of the
       early one are on their way. If either would be empty, the group is one segment. The
       device computes the operations of a segment one after the other, without waiting between
       them, for the sum of their `seconds / speed`, and for `graph.segment_seconds / speed` if they
       compute anything forward. To the backward computations come the `accumulation_seconds`, but
       for the first micro-batch, here spread evenly over all. What is `stored` is in no segment.
    2. *Order.* A device executes the forward computations of its segments and micro-batches by the
       sum of depth and number of the micro-batch, of equal ones by depth, and the early segment
       before the late one; then their backward computations in the opposite order. With the
       schedule `1f1b` it goes by a virtual clock: of D depths, the forward computation of depth d
       and micro-batch m has the time d + 2m, and the backward computation 2D - 1 - d + 2m; of a
       depth the early segment comes first forward, and the late one backward. A device never
       changes this order, and waits where something has not arrived.
    3. *Values.* When a forward computation ends, each value of the segment that other devices read
       goes to each of them: one transfer for each such device, however many operations read it
       there. A forward computation begins when all that its segment receives has arrived: what its
       own operations read, and no segment of the device before it.
    4. *Gradients.* When the backward computation of the segment that received a value has ended,
       the device returns the sum of its gradients of the value in one transfer of the value's size,
       unless the value is not `differentiable`. A backward computation begins when the gradients of
       the values of its segment have arrived from all devices that return one: the late segment,
       which sends no value, waits for none.
    5. *Links.* Each direction between two devices is a link of its own. It carries one transfer at
       a time, for `latency + size / bandwidth`, first come first served; of those that one segment
       sends, in the order of the operations that made the values. Each transfer also keeps both
       devices from computing, for the link's `work`: the sender when it has begun to send, and the
       receiver before the computation that needs the value, where it does not wait for it anyway.
    6. *Memory.* For each micro-batch a device holds the activations of its operations, the values
       that it receives and the gradients that it receives, from the first forward to the end of the
       step: what arrives early needs a place, and what a computation frees is left out of account.
       With `1f1b` these are D - d micro-batches at most. To that come the resident bytes, and once
       the largest sum of an operation's output and inputs: the gradients with which its backward
       computation works.
    7. *Parameters and buffers.* What is `stored` is sent as the step begins, once for all
       micro-batches. Its gradient returns once, after the last of the backward computations that
       rule 4 names. When a device has ended all its computations and all these gradients have
       arrived, it computes the backward seconds of what is stored there: the optimizer's update.
    """
    placed = device_numbers(graph, hardware, placement)
    simulator = Simulator(Costs.of(graph), hardware, micro_batches, schedule)
    parts = simulator.parts(placed)
    busy = simulator.busy_seconds(parts)
    peaks = simulator.peak_bytes(parts)
    devices = tuple(
        DevicePrediction(device.name, int(peak), float(seconds))
        for device, peak, seconds in zip(hardware.devices, peaks, busy, strict=True)
    )
    traffic = _traffic(hardware, parts.transfers, micro_batches)
    return Prediction(simulator.step_seconds(parts), devices, traffic)


def device_numbers(graph: CostGraph, hardware: Hardware, placement: Devices) -> Ints:
    """Returns the number of the device of each operation, in the order of the operations."""
    for name in placement:
        if name not in graph.positions:
            close = suggestion(name, graph.positions)
            raise ConfigurationError(f"the placement names an unknown operation {name!r}{close}")
    missing = [name for name in graph.positions if name not in placement]
    if missing:
        raise ConfigurationError(
            f"the placement names no device for {len(missing)} of {len(graph.operations)} "
            f"operations, such as {missing[0]!r}"
        )
    return np.array([hardware.number(placement[name]) for name in graph.positions], dtype=np.intp)


def _traffic(hardware: Hardware, transfers: Transfers, micro_batches: int) -> tuple[Traffic, ...]:
    carried: dict[tuple[int, int], list[float]] = {}
    columns = transfers[2:]
    for sender, receiver, size, returns, stored in zip(
        *(each.tolist() for each in columns), strict=True
    ):
        sizes = [size] * (1 if stored else micro_batches)
        carried.setdefault((sender, receiver), []).extend(sizes)
        if returns:
            carried.setdefault((receiver, sender), []).extend(sizes)
    return tuple(
        Traffic(
            hardware.devices[sender].name,
            hardware.devices[receiver].name,
            len(sizes),
            int(sum(sizes)),
            sum(map(hardware.between(sender, receiver).seconds, sizes)),
        )
        for (sender, receiver), sizes in sorted(carried.items())
    )
