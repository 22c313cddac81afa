"""Which values of a graph a gradient passes through."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from trireme.graph.capture.effects import Memory, written

_DETACHING = frozenset([torch.ops.aten.detach.default, torch.ops.aten.detach_.default])


def differentiable(
    graph: fx.Graph, memory: Memory, value_of: Callable[[fx.Node], Any]
) -> set[fx.Node]:
    """Returns the nodes on paths from a trained parameter to the graph's outputs.

    Nodes that share memory which is changed count as one, as what one writes the others read: so
    the set may hold a node too many, but none too few.
    """

    def shared(node: fx.Node) -> fx.Node:
        return memory.group(node) if memory.changes(node) else node

    ways: list[tuple[fx.Node, fx.Node]] = []
    for node in (each for each in graph.nodes if each.op == "call_function"):
        changed = written(node)
        if node.target not in _DETACHING and (changed or _is_floating(node.meta.get("val"))):
            for after in (node, *changed):
                ways += [(shared(before), shared(after)) for before in node.all_input_nodes]
    attributes = {node: value_of(node) for node in graph.find_nodes(op="get_attr")}
    parameters = [
        shared(node)
        for node, value in attributes.items()
        if isinstance(value, torch.Tensor) and value.requires_grad
    ]
    returned = [shared(node) for node in graph.output_node().all_input_nodes]
    found = _reached(parameters, ways) & _reached(returned, [(b, a) for a, b in ways])
    return {
        node
        for node in graph.nodes
        if shared(node) in found
        and _is_floating(attributes[node] if node in attributes else node.meta.get("val"))
    }


def _reached(starts: Iterable[fx.Node], ways: Iterable[tuple[fx.Node, fx.Node]]) -> set[fx.Node]:
    following: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for one, other in ways:
        following[one].append(other)
    open_ = list(starts)
    found = set(open_)
    while open_:
        for each in following[open_.pop()]:
            if each not in found:
                found.add(each)
                open_.append(each)
    return found


def _is_floating(value: Any) -> bool:
    values = value if isinstance(value, (tuple, list)) else (value,)
    return any(
        isinstance(each, torch.Tensor) and (each.is_floating_point() or each.is_complex())
        for each in values
    )
