"""Predicts the step time and the memory of a placement, by simulating a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trireme.graph.place.costs import CostGraph, Costs, Devices, Hardware
from trireme.graph.place.simulation import Simulator


@dataclass(frozen=True)
class DevicePrediction:
    """What one device does in a step."""

    device: str
    peak_bytes: int  # the most that it holds at a time
    busy_seconds: float  # how long it computes


@dataclass(frozen=True)
class Prediction:
    """What a step of a placement costs."""

    step_seconds: float  # from the first computation to the end of the last
    devices: tuple[DevicePrediction, ...]
    transfers: int  # values and gradients of all micro-batches, between any two devices


def predict(
    graph: CostGraph, hardware: Hardware, placement: Devices, micro_batches: int = 1
) -> Prediction:
    """Predicts the duration of a step, and what its devices do in it.

    The executor and this function follow the same rules:

    1. *Segments.* They are those of `trireme.graph.execute.cut`; what is `stored` adds nothing to
       the depth. One takes the sum of its seconds, and `segment_seconds` if it computes forward.
    2. *Order.* That of `trireme.graph.execute.plan`. A device never changes it: it waits.
    3. *Values.* When a forward computation ends, each value that other devices read goes once to
       each of them. A forward computation begins when all has arrived that its own operations read
       and no segment of the device before it.
    4. *Gradients.* When the backward computation of the segment that received a value has ended,
       its gradient returns in one transfer, if it is `differentiable`. A backward computation
       begins when the gradients of its values have arrived; the late segment waits for none.
    5. *Links.* Each direction between two devices carries one transfer at a time, for
       `latency + size / bandwidth`, first come first served. Each also keeps both devices from
       computing, for the link's `work`: the receiver where it does not wait for the value anyway.
    6. *Memory.* For each micro-batch, of D - d at most, a device holds activations, and values and
       gradients that it receives; to that come the resident bytes, and once the largest sum of an
       operation's output and inputs.
    7. *Parameters and buffers.* What is `stored` is sent as the step begins, once for all
       micro-batches. Its gradient returns once, after the last backward computation that reads it.
       When a device has ended its computations and these gradients have arrived, it updates what
       is stored there.
    """
    placed = np.array(
        [hardware.numbers[placement[name]] for name in graph.positions], dtype=np.intp
    )
    simulator = Simulator(Costs.of(graph), hardware, micro_batches)
    parts = simulator.parts(placed)
    busy, peaks = simulator.busy_seconds(parts), simulator.peak_bytes(parts)
    devices = tuple(
        DevicePrediction(device.name, int(peak), float(seconds))
        for device, peak, seconds in zip(hardware.devices, peaks, busy, strict=True)
    )
    return Prediction(simulator.step_seconds(parts), devices, int(simulator.times(parts).sum()))
