"""Predicts the step time and the memory of a placement, by simulating a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trireme.errors import ConfigurationError, suggestion
from trireme.graph.costs import CostGraph, Devices, Hardware
from trireme.graph.simulation import Costs, Ints, Simulator, Transfer


@dataclass(frozen=True)
class DevicePrediction:
    """What one device does in a step.

    Attributes:
        device: its name.
        peak_bytes: the most that it holds at a time.
        busy_seconds: how long it computes.
    """

    device: str
    peak_bytes: int
    busy_seconds: float


@dataclass(frozen=True)
class Traffic:
    """What one link carries in a step, values and gradients, over all micro-batches.

    Attributes:
        sender: the name of the device that sends.
        receiver: the name of the device that receives.
        transfers: their number.
        total_bytes: their sizes together.
        busy_seconds: how long they occupy the link.
    """

    sender: str
    receiver: str
    transfers: int
    total_bytes: int
    busy_seconds: float


@dataclass(frozen=True)
class Prediction:
    """What a step of a placement costs.

    Attributes:
        step_seconds: from the first computation to the end of the last.
        devices: in the order of the hardware's devices.
        traffic: the links that carry something, by sender and receiver.
    """

    step_seconds: float
    devices: tuple[DevicePrediction, ...]
    traffic: tuple[Traffic, ...]


def predict(
    graph: CostGraph, hardware: Hardware, placement: Devices, micro_batches: int = 1
) -> Prediction:
    """Predicts the duration of a step, and what devices and links do in it.

    The executor and this function follow the same rules:

    1. *Order.* A device executes, for each micro-batch from first to last, the forward computations
       of its operations in the order of `graph.operations`; then, for each micro-batch from last to
       first, their backward computations in the opposite order. It never changes this order, waits
       where an input has not arrived, and computes one operation at a time, for
       `seconds / speed`. An operation without backward seconds takes part all the same.
    2. *Values.* When a forward computation ends, its value goes to every other device on which an
       operation reads it: one transfer for each such device, however many operations read it
       there. A forward computation begins when its inputs on other devices have arrived.
    3. *Gradients.* When a device has executed the backward computations of all its readers of a
       value of another device, it returns the sum of their gradients in one transfer of the
       value's size, unless the value is not `differentiable`. A backward computation begins when
       the gradients of the operation's value have arrived from all devices that return one.
    4. *Links.* Each direction between two devices is a link of its own. It carries one transfer at
       a time, for `latency + size / bandwidth`, first come first served; of those that one
       operation sends, values go in the order of the operations that made them, and gradients in
       the opposite order. Transfers do not delay computations, except by arriving late.
    5. *Memory.* For each micro-batch a device holds the activations of its operations, the values
       that it receives and the gradients that it receives, from the first forward to the end of the
       step: what arrives early needs a place, and what a computation frees is left out of account.
       To that come the resident bytes, and once the largest sum of an operation's output and
       inputs: the gradients with which its backward computation works.

    The optimizer's step, after the last backward computation, is not a part of it.

    Args:
        graph: the operations and their costs.
        hardware: the devices and the links.
        placement: the device of every operation.
        micro_batches: into how many parts, whose costs `graph` states, a step divides the batch.

    Raises:
        ConfigurationError: an operation has no device or an unknown one, the placement names an
            unknown operation, or there is not at least one micro-batch.
    """
    placed = device_numbers(graph, hardware, placement)
    simulator = Simulator(Costs.of(graph), hardware, micro_batches)
    transfers = simulator.transfers(placed)
    operations = np.arange(len(placed))
    computing = (simulator.forward + simulator.backward)[placed, operations] * micro_batches
    busy = np.bincount(placed, computing, simulator.devices)
    peaks = simulator.peak_bytes(placed, transfers)
    devices = tuple(
        DevicePrediction(device.name, int(peak), float(seconds))
        for device, peak, seconds in zip(hardware.devices, peaks, busy, strict=True)
    )
    traffic = _traffic(hardware, transfers, micro_batches)
    return Prediction(simulator.step_seconds(placed, transfers), devices, traffic)


def device_numbers(graph: CostGraph, hardware: Hardware, placement: Devices) -> Ints:
    """Returns the number of the device of each operation, in the order of the operations.

    Raises:
        ConfigurationError: as in `predict`.
    """
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


def _traffic(
    hardware: Hardware, transfers: list[Transfer], micro_batches: int
) -> tuple[Traffic, ...]:
    carried: dict[tuple[int, int], list[float]] = {}
    for transfer in transfers:
        sender, receiver = transfer.sender, transfer.receiver
        carried.setdefault((sender, receiver), []).append(transfer.size)
        if transfer.returns:
            carried.setdefault((receiver, sender), []).append(transfer.size)
    return tuple(
        Traffic(
            hardware.devices[sender].name,
            hardware.devices[receiver].name,
            micro_batches * len(sizes),
            micro_batches * int(sum(sizes)),
            micro_batches * sum(map(hardware.between(sender, receiver).seconds, sizes)),
        )
        for (sender, receiver), sizes in sorted(carried.items())
    )
