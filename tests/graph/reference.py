"""The rules of `predict`, executed one computation at a time, and graphs to execute."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import strategies as st

from trireme.graph.place.costs import CostGraph, Device, Hardware, Link, Operation


def step_seconds(
    graph: CostGraph, hardware: Hardware, placement: dict[str, str], micro_batches: int
) -> float:
    operations = {each.name: each for each in graph.operations}
    order = list(operations)
    names = [device.name for device in hardware.devices]
    readers: dict[str, list[str]] = defaultdict(list)
    for each in graph.operations:
        for name in dict.fromkeys(each.inputs):
            readers[name].append(each.name)
    depth: dict[str, int] = {}
    for each in graph.operations:
        above = [
            depth[name] + (placement[name] != placement[each.name] and not operations[name].stored)
            for name in each.inputs
        ]
        depth[each.name] = max(above, default=0)
    part = parts(graph, placement, depth)
    segments: dict[tuple[int, int, str], list[str]] = defaultdict(list)
    computed = [name for name in order if not operations[name].stored]
    for name in computed:
        segments[depth[name], part[name], placement[name]].append(name)
    turns = sorted(
        (at + number, at, half, number, device)
        for at, half, device in segments
        for number in range(micro_batches)
    )
    device_free: dict[str, float] = defaultdict(float)
    link_free: dict[tuple[str, str], float] = defaultdict(float)
    arrived: dict[tuple[str, str, str, int], float] = {}

    def elsewhere(name: str) -> list[str]:
        here = placement[name]
        return [
            device for device in names
            if device != here and any(placement[reader] == device for reader in readers[name])
        ]  # fmt: skip

    def first(name: str, device: str) -> tuple[int, int]:
        return min(
            (depth[reader], part[reader]) for reader in readers[name] if placement[reader] == device
        )

    def received(at: int, half: int, device: str) -> list[str]:
        return [
            name for name in order
            if device in elsewhere(name) and first(name, device) == (at, half)
        ]  # fmt: skip

    def work(sender: str, receiver: str, name: str) -> float:
        link = hardware.between(hardware.numbers[sender], hardware.numbers[receiver])
        return link.work(operations[name].output_bytes)

    def execute(device: str, seconds: float, awaited: list[float], receiving: float = 0.0) -> None:
        begins = max([device_free[device] + receiving, *awaited])
        device_free[device] = begins + seconds

    def send(kind: str, name: str, number: int, sender: str, receiver: str) -> None:
        link = hardware.between(hardware.numbers[sender], hardware.numbers[receiver])
        begins = max(device_free[sender], link_free[sender, receiver])
        end = begins + link.seconds(operations[name].output_bytes)
        link_free[sender, receiver] = end
        device_free[sender] += work(sender, receiver, name)
        arrived[kind, name, receiver if kind == "value" else sender, number] = end

    def fixed(names: list[str]) -> float:
        computes = any(operations[name].forward_seconds for name in names)
        return graph.segment_seconds if computes else 0.0

    stored = [name for name in order if operations[name].stored]
    for name in stored:
        for there in elsewhere(name):
            send("value", name, 0, placement[name], there)
            device_free[there] += work(placement[name], there, name)
            for number in range(1, micro_batches):
                arrived["value", name, there, number] = arrived["value", name, there, 0]

    def forward(at: int, half: int, device: str, number: int) -> None:
        names = segments[at, half, device]
        seconds = fixed(names) + sum(operations[name].forward_seconds for name in names)
        awaited = [arrived["value", name, device, number] for name in received(at, half, device)]
        receiving = sum(
            work(placement[name], device, name)
            for name in received(at, half, device)
            if name not in stored
        )
        execute(device, seconds, awaited, receiving)
        for name in names:
            for there in elsewhere(name):
                send("value", name, number, device, there)

    def backward(at: int, half: int, device: str, number: int) -> None:
        names = segments[at, half, device]
        seconds = fixed(names) + sum(operations[name].backward_seconds for name in names)
        returned = [
            (name, there)
            for name in names
            if operations[name].differentiable
            for there in elsewhere(name)
        ]
        awaited = [arrived["gradient", name, there, number] for name, there in returned]
        receiving = sum(work(there, device, name) for name, there in returned)
        execute(device, seconds, awaited, receiving)
        for name in received(at, half, device):
            if operations[name].differentiable and (number == final or name not in stored):
                send("gradient", name, number, device, placement[name])

    final, depths = micro_batches - 1, max(depth.values()) + 1
    for clock in range(2 * (depths + micro_batches)):
        for _, at, half, number, device in turns:
            if clock == at + 2 * number:
                forward(at, half, device, number)
        for _, at, half, number, device in reversed(turns):
            if clock == 2 * depths - 1 - at + 2 * number:
                backward(at, half, device, number)
    for name in stored:
        for there in elsewhere(name) if operations[name].differentiable else ():
            execute(
                placement[name],
                0.0,
                [arrived["gradient", name, there, final]],
                work(there, placement[name], name),
            )
    for name in stored:
        execute(placement[name], operations[name].backward_seconds, [])
    return max(device_free.values(), default=0.0)


def parts(graph: CostGraph, placement: dict[str, str], depth: dict[str, int]) -> dict[str, int]:
    """0 for each operation that another device waits for, itself or through its group; else 1."""
    part = {each.name: 1 for each in graph.operations}

    def wait_for(name: str, group: tuple[int, str]) -> None:
        if not operations[name].stored and (depth[name], placement[name]) == group:
            part[name] = 0
            for above in operations[name].inputs:
                wait_for(above, group)

    operations = {each.name: each for each in graph.operations}
    for each in graph.operations:
        for name in each.inputs:
            if placement[name] != placement[each.name]:
                wait_for(name, (depth[name], placement[name]))
    return part


COSTS = st.sampled_from((0.0, 0.5, 1.0, 2.0, 3.0, 7.0))
SIZES = st.sampled_from((0, 1, 2, 5, 16))


@st.composite
def graphs(draw: st.DrawFn, most: int = 12, least: int = 1) -> CostGraph:
    operations: list[Operation] = []
    for number in range(draw(st.integers(least, most))):
        inputs: list[str] = []
        stored = draw(st.integers(0, 4)) == 0
        if operations and not stored:
            names = st.sampled_from([each.name for each in operations])
            inputs = draw(st.lists(names, max_size=3))
        operations.append(
            Operation(
                f"o{number}",
                tuple(inputs),
                0.0 if stored else draw(COSTS),
                draw(COSTS),
                *(draw(SIZES) for _ in range(3)),
                differentiable=draw(st.integers(0, 4)) > 0,
                stored=stored,
            )
        )
    return CostGraph(tuple(operations), draw(st.sampled_from((0.0, 0.25))))


@st.composite
def machines(draw: st.DrawFn, most: int = 3, memory: bool = False) -> Hardware:
    limits = st.sampled_from((None, 40, 80, 160)) if memory else st.none()
    devices = tuple(
        Device(f"d{number}", draw(limits)) for number in range(draw(st.integers(1, most)))
    )
    links = st.builds(
        Link,
        st.sampled_from((0.0, 0.5)),
        st.sampled_from((1.0, 4.0, 1e9)),
        st.sampled_from((0.0, 0.25)),
        st.sampled_from((0.0, 0.125)),
    )
    names = [device.name for device in devices]
    pairs = [(one, other) for one in names for other in names if one != other]
    others = draw(st.dictionaries(st.sampled_from(pairs), links, max_size=3)) if pairs else {}
    return Hardware(devices, draw(links), others)
