"""Puts a picture together from a captured, optimised, placed and cut graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
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
    Edge,
    Node,
    Picture,
    PlaceUse,
    Transfer,
)
from trireme.graph.drawing.words import operator_name, shape_text
from trireme.graph.execute.cut import Cut
from trireme.graph.place.costs import CostGraph, Hardware, Operation
from trireme.graph.place.placement import Placement

_NO_SCOPE = "_empty_nn_module_stack"  # torch's name of a scope where it knows none


def picture_of(
    captured: Capture | None,
    optimised: Optimised,
    placement: Placement | None,
    cut: Cut | None,
    costs: CostGraph | None,
    *,
    hardware: Hardware | None = None,
    micro_batches: int = 1,
    model: str = "",
) -> Picture:
    """Returns what is to be shown of a model."""
    graph = optimised.capture.module.graph
    operations = {each.name: each for each in costs.operations} if costs else {}
    places = _places(graph, placement, cut)
    segments = _segments(cut)
    names = {*operations, *places}
    nodes = [
        _node(node, operations.get(node.name), places.get(node.name, ""), segments.get(node.name))
        for node in _shown(graph, names)
    ]
    known = {node.name for node in nodes}
    extra = [each for name, each in operations.items() if name not in known]
    nodes += [_loss(each, places.get(each.name, "")) for each in extra]
    sizes = {node.name: _bytes(node, operations) for node in graph.nodes}
    sizes |= {each.name: each.output_bytes for each in extra}
    shown = {node.name: node for node in nodes}
    pairs = [
        (source.name, node.name)
        for node in graph.nodes
        for source in node.all_input_nodes
        if node.name in shown
    ]
    pairs += [(source, each.name) for each in extra for source in each.inputs]
    edges = tuple(_edges(pairs, shown, sizes))
    prediction = placement.prediction if placement else None
    limits = {each.name: each.memory_bytes for each in hardware.devices} if hardware else {}
    return Picture(
        model=model,
        captured=tuple(_listed(captured.module.graph)) if captured else (),
        passes=optimised.passes,
        nodes=tuple(nodes),
        edges=edges,
        places=tuple(
            PlaceUse(each.device, each.busy_seconds, each.peak_bytes, limits.get(each.device))
            for each in (prediction.devices if prediction else ())
        ),
        transfers=tuple(_transfers(cut, edges, shown, sizes, operations)),
        reason=placement.reason if placement else "",
        tried=dict(placement.tried) if placement else {},
        step_seconds=prediction.step_seconds if prediction else None,
        micro_batches=micro_batches,
        placed=placement is not None,
        cut=cut is not None,
        costed=costs is not None,
    )


def scope_of(node: fx.Node) -> str:
    """Returns the path of a node's module, that of the owner for a parameter; "" if unknown."""
    if node.op == "get_attr":
        return str(node.target).rpartition(".")[0]
    path = scope(node)
    return "" if path.startswith(_NO_SCOPE) else path


def _shown(graph: fx.Graph, names: set[str]) -> Iterator[fx.Node]:
    """Yields the nodes to show; parameters only where they have a place or costs of their own."""
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


def _listed(graph: fx.Graph) -> Iterator[Node]:
    for node in _computed(graph):
        yield _node(node, None, "", None)


def _node(
    node: fx.Node, costs: Operation | None, place: str, segment: tuple[int, bool] | None
) -> Node:
    kinds = {"placeholder": INPUT, "output": OUTPUT, "get_attr": PARAMETER}
    found = Node(
        name=node.name,
        operator=kinds.get(node.op) or operator_name(node),
        scope=scope_of(node) if node.op in ("call_function", "get_attr") else "",
        shape="" if node.op == "output" else shape_text(node.meta.get("val")),
        source=str(source_line(node) or "") if node.op == "call_function" else "",
        place=place,
        depth=segment[0] if segment else None,
        late=segment is not None and segment[1],
    )
    return _costed(found, costs) if costs else found


def _loss(costs: Operation, place: str) -> Node:
    return _costed(Node(costs.name, LOSS, place=place), costs)


def _costed(node: Node, costs: Operation) -> Node:
    return replace(
        node,
        forward_seconds=costs.forward_seconds,
        backward_seconds=costs.backward_seconds,
        resident_bytes=costs.resident_bytes,
        activation_bytes=costs.activation_bytes,
    )


# Where nodes are ------------------------------------------------------------------------------


def _places(graph: fx.Graph, placement: Placement | None, cut: Cut | None) -> dict[str, str]:
    """Returns the place of each node that has one.

    Nodes that the placement does not name are where the cut has put them; what takes a value out of
    several is where these are.
    """
    if placement is None:
        return {}
    places = dict(placement.devices)
    if cut is not None:
        names = _task_names(cut, places)
        owners: dict[str, set[int]] = {}
        for segment in cut.segments:
            for node in _computed(segment.module.graph):
                owners.setdefault(node.name, set()).add(segment.place)
        for name, tasks in owners.items():
            if len(tasks) == 1:
                places.setdefault(name, names[min(tasks)])
        output = graph.output_node().name
        places.setdefault(output, names[cut.segments[-1].place])
    for node in graph.nodes:
        if node.target is getitem and node.all_input_nodes:
            above = places.get(node.all_input_nodes[0].name)
            if above is not None:
                places.setdefault(node.name, above)
    return places


def _task_names(cut: Cut, places: Mapping[str, str]) -> dict[int, str]:
    """Returns the place that most of a task's nodes have; `worker:N` for a task without nodes."""
    votes: dict[int, dict[str, int]] = {}
    for segment in cut.segments:
        found = votes.setdefault(segment.place, {})
        for node in segment.module.graph.nodes:
            if node.op != "placeholder" and node.name in places:
                place = places[node.name]
                found[place] = found.get(place, 0) + 1
    tasks = {task for value in cut.values.values() for task in (value.place, *value.readers)}
    names = {task: f"worker:{task}" for task in {*votes, *tasks}}
    return names | {
        task: max(found, key=found.__getitem__) for task, found in votes.items() if found
    }


def _segments(cut: Cut | None) -> dict[str, tuple[int, bool]]:
    """Returns the depth of each node that one task alone computes, and whether it is late."""
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


# Values ---------------------------------------------------------------------------------------


def _edges(
    pairs: Iterable[tuple[str, str]], nodes: Mapping[str, Node], sizes: Mapping[str, int]
) -> Iterator[Edge]:
    for source, target in dict.fromkeys(pairs):
        if source in nodes and target in nodes:
            here, there = nodes[source].place, nodes[target].place
            crosses = bool(here and there and here != there)
            yield Edge(source, target, sizes.get(source, 0), crosses)


def _transfers(
    cut: Cut | None,
    edges: Sequence[Edge],
    nodes: Mapping[str, Node],
    sizes: Mapping[str, int],
    operations: Mapping[str, Operation],
) -> Iterator[Transfer]:
    """Yields what is transferred: as the cut says, else as the places of the nodes do."""
    if cut is None:
        ways = {
            (edge.source, nodes[edge.target].place): edge.bytes for edge in edges if edge.crosses
        }
        for (name, receiver), size in ways.items():
            returns = operations[name].differentiable if name in operations else False
            yield Transfer(name, nodes[name].place, receiver, size, returns)
        return
    names = _task_names(cut, {name: node.place for name, node in nodes.items() if node.place})
    for value in cut.values.values():
        for task in value.readers:
            own = nodes[value.name].place if value.name in nodes else ""
            sender = own or names[value.place]
            size = sizes.get(value.name, 0)
            yield Transfer(value.name, sender, names[task], size, value.differentiable)


def _bytes(node: fx.Node, operations: Mapping[str, Operation]) -> int:
    """Returns the size of a node's value: that of the costs, else of the batch of the capture."""
    if node.name in operations and operations[node.name].output_bytes:
        return operations[node.name].output_bytes
    return _size(node.meta.get("val"))


def _size(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        size = value.dtype.itemsize
        for each in value.shape:
            size *= _hint(each)
        return size
    if isinstance(value, tuple | list):
        return sum(map(_size, value))
    return 0


def _hint(size: Any) -> int:
    """Returns a size as a number: that of the example's batch where it is a symbol."""
    if isinstance(size, torch.SymInt):
        return int(size.node.hint) if size.node.has_hint() else 1
    return int(size)
