"""Puts a picture together from a captured, optimised, placed and cut graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import getitem
from typing import Any

import torch
from torch import fx

from trireme.graph.capture.capture import Capture
from trireme.graph.capture.optimise import Optimised
from trireme.graph.capture.source import scope, source_line
from trireme.graph.drawing.picture import (
    INPUT,
    LOSS,
    OUTPUT,
    PARAMETER,
    DeviceUse,
    Edge,
    Node,
    Picture,
    Transfer,
)
from trireme.graph.drawing.words import operator_name, shape_text
from trireme.graph.execute.cut import Cut
from trireme.graph.place.costs import CostGraph, Hardware, Operation
from trireme.graph.place.placement import Placement

_NO_SCOPE = "_empty_nn_module_stack"  # torch's name of a scope where it knows none
_KINDS = {"placeholder": INPUT, "output": OUTPUT, "get_attr": PARAMETER}


def picture_of(
    optimised: Optimised,
    placement: Placement,
    costs: CostGraph,
    hardware: Hardware,
    *,
    captured: Capture | None = None,
    cut: Cut | None = None,
    micro_batches: int = 1,
    model: str = "",
) -> Picture:
    """Returns what is to be shown of a placed model; segments and transfers only if it is cut."""
    graph = optimised.capture.module.graph
    operations = {each.name: each for each in costs.operations}
    places = _places(graph, placement, cut)
    segments = _segments(cut)

    def placed(node: fx.Node) -> Node:
        depth, late = segments.get(node.name, (None, False))
        return _node(node, operations.get(node.name), places.get(node.name, ""), depth, late)

    nodes = {node.name: placed(node) for node in _shown(graph, {*operations, *places})}
    sizes = {node.name: _bytes(node, operations) for node in graph.nodes}
    pairs = [(one.name, node.name) for node in graph.nodes for one in node.all_input_nodes]
    for name in [each for each in operations if each not in nodes]:
        nodes[name] = Node(name, LOSS, place=places.get(name, ""), **_costs(operations[name]))
        pairs += [(source, name) for source in operations[name].inputs]
    limits = {each.name: each.memory_bytes for each in hardware.devices}
    return Picture(
        nodes=tuple(nodes.values()),
        edges=tuple(
            Edge(source, target, sizes[source])
            for source, target in dict.fromkeys(pairs)
            if source in nodes and target in nodes
        ),
        model=model,
        captured=tuple(map(_node, _computed(captured.module.graph))) if captured else (),
        passes=optimised.passes,
        uses=tuple(
            DeviceUse(each.device, each.busy_seconds, each.peak_bytes, limits[each.device])
            for each in placement.prediction.devices
        ),
        transfers=tuple(_transfers(cut, places, sizes)) if cut else (),
        reason=placement.reason,
        tried=dict(placement.tried),
        step_seconds=placement.prediction.step_seconds,
        micro_batches=micro_batches,
    )


def scope_of(node: fx.Node) -> str:
    """Returns the path of a node's module, that of the owner for a parameter; "" if unknown."""
    if node.op == "get_attr":
        return str(node.target).rpartition(".")[0]
    path = scope(node)
    return "" if path.startswith(_NO_SCOPE) else path


def _shown(graph: fx.Graph, names: set[str]) -> Iterator[fx.Node]:
    waiting = {node: None for node in graph.nodes if node.op == "get_attr" and node.name in names}
    for node in graph.nodes:
        if node.op == "get_attr":
            continue
        for each in node.all_input_nodes:
            if each in waiting:
                del waiting[each]
                yield each
        yield node
    yield from waiting


def _node(
    node: fx.Node,
    costs: Operation | None = None,
    place: str = "",
    depth: int | None = None,
    late: bool = False,
) -> Node:
    return Node(
        name=node.name,
        operator=_KINDS.get(node.op) or operator_name(node),
        scope=scope_of(node) if node.op in ("call_function", "get_attr") else "",
        shape="" if node.op == "output" else shape_text(node.meta.get("val")),
        source=source_line(node) if node.op == "call_function" else "",
        place=place,
        depth=depth,
        late=late,
        **(_costs(costs) if costs else {}),
    )


def _costs(operation: Operation) -> dict[str, Any]:
    names = ("forward_seconds", "backward_seconds", "resident_bytes", "activation_bytes")
    return {name: getattr(operation, name) for name in names}


def _places(graph: fx.Graph, placement: Placement, cut: Cut | None) -> dict[str, str]:
    """Returns the place of each node that has one.

    Nodes that the placement does not name are where the cut has put them; what takes a value out of
    several is where these are.
    """
    places = dict(placement.devices)
    if cut is not None:
        names = _place_names(cut, places)
        owners: dict[str, set[int]] = {}
        for segment in cut.segments:
            for node in _computed(segment.module.graph):
                owners.setdefault(node.name, set()).add(segment.place)
        for name, tasks in owners.items():
            if len(tasks) == 1:
                places.setdefault(name, names[min(tasks)])
        places.setdefault(graph.output_node().name, names[cut.segments[-1].place])
    for node in graph.nodes:
        if node.target is getitem and node.all_input_nodes:
            above = places.get(node.all_input_nodes[0].name)
            if above is not None:
                places.setdefault(node.name, above)
    return places


def _place_names(cut: Cut, places: Mapping[str, str]) -> dict[int, str]:
    names: dict[int, str] = {}
    for segment in cut.segments:
        for node in segment.module.graph.nodes:
            if node.op != "placeholder" and node.name in places:
                names.setdefault(segment.place, places[node.name])
    for value in cut.values.values():
        if value.name in places:
            names.setdefault(value.place, places[value.name])
    numbers = {number for value in cut.values.values() for number in (value.place, *value.readers)}
    numbers |= {segment.place for segment in cut.segments}
    return {number: names.get(number, f"worker:{number}") for number in numbers}


def _segments(cut: Cut | None) -> dict[str, tuple[int, bool]]:
    """Returns the depth of each node that one place alone computes, and whether it is late."""
    found: dict[str, dict[int, tuple[int, bool]]] = {}
    segments = cut.segments if cut else ()
    split = {(each.depth, each.place) for each in segments if each.part == 0}
    for segment in segments:
        late = segment.part == 1 and (segment.depth, segment.place) in split
        for node in _computed(segment.module.graph):
            found.setdefault(node.name, {}).setdefault(segment.place, (segment.depth, late))
    return {name: next(iter(at.values())) for name, at in found.items() if len(at) == 1}


def _computed(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function"]


def _transfers(cut: Cut, places: Mapping[str, str], sizes: Mapping[str, int]) -> Iterator[Transfer]:
    names = _place_names(cut, places)
    for value in cut.values.values():
        sender = places.get(value.name) or names[value.place]
        for number in value.readers:
            size = sizes.get(value.name, 0)
            yield Transfer(value.name, sender, names[number], size, value.differentiable)


def _bytes(node: fx.Node, operations: Mapping[str, Operation]) -> int:
    if node.name in operations and operations[node.name].output_bytes:
        return operations[node.name].output_bytes
    return _size(node.meta.get("val"))


def _size(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        size = value.dtype.itemsize
        for each in value.shape:
            size *= _hint(each)
        return size
    return sum(map(_size, value)) if isinstance(value, tuple | list) else 0


def _hint(size: Any) -> int:
    if isinstance(size, torch.SymInt):
        return int(size.node.hint) if size.node.has_hint() else 1
    return int(size)
