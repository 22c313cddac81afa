"""The rules of `predict`, executed one computation at a time, and graphs to execute."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import strategies as st

from trireme.graph.costs import CostGraph, Device, Hardware, Link, Operation


def step_seconds(
    graph: CostGraph, hardware: Hardware, placement: dict[str, str], micro_batches: int
) -> float:
    operations = {each.name: each for each in graph.operations}
    order = list(operations)
    speed = {device.name: device.speed for device in hardware.devices}
    readers: dict[str, list[str]] = defaultdict(list)
    for each in graph.operations:
        for name in dict.fromkeys(each.inputs):
            readers[name].append(each.name)
    device_free: dict[str, float] = defaultdict(float)
    link_free: dict[tuple[str, str], float] = defaultdict(float)
    arrived: dict[tuple[str, str], float] = {}

    def send(key: str, size: int, sender: str, receiver: str) -> None:
        link = hardware.between(hardware.number(sender), hardware.number(receiver))
        begins = max(device_free[sender], link_free[sender, receiver])
        link_free[sender, receiver] = begins + link.seconds(size)
        arrived[key, receiver] = link_free[sender, receiver]

    def elsewhere(name: str) -> list[str]:
        here = placement[name]
        return [
            device for device in speed
            if device != here and any(placement[reader] == device for reader in readers[name])
        ]  # fmt: skip

    for _ in range(micro_batches):
        for name in order:
            here, operation = placement[name], operations[name]
            inputs = [each for each in operation.inputs if placement[each] != here]
            begins = max([device_free[here], *(arrived[each, here] for each in inputs)])
            device_free[here] = begins + operation.forward_seconds / speed[here]
            for there in elsewhere(name):
                send(name, operation.output_bytes, here, there)
    for _ in range(micro_batches):
        left = {
            (name, there): sum(placement[reader] == there for reader in readers[name])
            for name in order
            for there in elsewhere(name)
        }
        for name in reversed(order):
            here, operation = placement[name], operations[name]
            gradients = [f"gradient {name} {there}" for there in elsewhere(name)]
            if not operation.differentiable:
                gradients = []
            begins = max([device_free[here], *(arrived[each, here] for each in gradients)])
            device_free[here] = begins + operation.backward_seconds / speed[here]
            for each in sorted(set(operation.inputs), key=order.index, reverse=True):
                if placement[each] != here:
                    left[each, here] -= 1
                    if not left[each, here] and operations[each].differentiable:
                        size = operations[each].output_bytes
                        send(f"gradient {each} {here}", size, here, placement[each])
    return max(device_free.values(), default=0.0)


COSTS = st.sampled_from((0.0, 0.5, 1.0, 2.0, 3.0, 7.0))
SIZES = st.sampled_from((0, 1, 2, 5, 16))


@st.composite
def graphs(draw: st.DrawFn, most: int = 12, least: int = 1) -> CostGraph:
    operations: list[Operation] = []
    for number in range(draw(st.integers(least, most))):
        inputs: list[str] = []
        if operations:
            names = st.sampled_from([each.name for each in operations])
            inputs = draw(st.lists(names, max_size=3))
        operations.append(
            Operation(
                f"o{number}",
                tuple(inputs),
                *(draw(COSTS) for _ in range(2)),
                *(draw(SIZES) for _ in range(3)),
                differentiable=draw(st.integers(0, 4)) > 0,
            )
        )
    return CostGraph(tuple(operations))


@st.composite
def machines(draw: st.DrawFn, most: int = 3, memory: bool = False) -> Hardware:
    limits = st.sampled_from((None, 40, 80, 160)) if memory else st.none()
    devices = tuple(
        Device(f"d{number}", draw(st.sampled_from((0.5, 1.0, 2.0))), draw(limits))
        for number in range(draw(st.integers(1, most)))
    )
    links = st.builds(Link, st.sampled_from((0.0, 0.5)), st.sampled_from((1.0, 4.0, 1e9)))
    names = [device.name for device in devices]
    pairs = [(one, other) for one in names for other in names if one != other]
    others = draw(st.dictionaries(st.sampled_from(pairs), links, max_size=3)) if pairs else {}
    return Hardware(devices, draw(links), others)
