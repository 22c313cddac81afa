"""The nodes that every place computes for itself, and those that one place computes together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import product
from operator import attrgetter, getitem
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from trireme.graph.capture.effects import Memory, written
from trireme.graph.capture.exporting import tensors
from trireme.graph.capture.rebuild import constants_of

COPY = "trireme_copy"  # the metadata of a copy of a returned buffer


def has_tensors(node: fx.Node) -> bool:
    """Returns whether the value of a node is or has tensors, or is not known."""
    value = node.meta.get("val")
    return value is None or bool(tensors(value))


def everywhere(graph: fx.Graph, memory: Memory, module: fx.GraphModule) -> set[fx.Node]:
    """Returns the model's inputs, constants, the sizes of tensors, and views of all these.

    A view takes no time, wherever it is made: such as the half of the inputs that a tower reads.
    Views of memory that some node changes are left out.
    """
    constants = constants_of(module, graph)
    found = set[fx.Node]()
    for node in graph.nodes:
        if node.op == "get_attr":
            tensor = isinstance(attrgetter(str(node.target))(module), torch.Tensor)
            has = not tensor or (node in constants and not memory.changes(node))
        elif node.op == "call_function" and has_tensors(node):
            read = node.all_input_nodes
            has = _is_view(node) and not memory.changes(node) and bool(read) and found >= set(read)
        else:
            has = node.op in ("placeholder", "call_function")
        if has:
            found.add(node)
    return found


def _is_view(node: fx.Node) -> bool:
    if node.target is getitem:
        return True
    if not isinstance(node.target, OpOverload):
        return False
    shared = [each.alias_info for each in node.target._schema.returns]
    return bool(shared) and all(each is not None and not each.is_write for each in shared)


def copy_returned_buffers(graph: fx.Graph, memory: Memory) -> None:
    """Copies returned buffers that the graph changes: the next micro-batch changes them again.

    The graph is changed; the copies have `COPY` in their metadata.
    """
    buffers = {memory.group(node) for node in graph.find_nodes(op="get_attr")}
    output = graph.output_node()
    for node in output.all_input_nodes:
        if memory.changes(node) and memory.group(node) in buffers:
            with graph.inserting_before(output):
                copy = graph.call_function(torch.ops.aten.clone.default, (node,))
            copy.meta.update(node.meta, **{COPY: True})
            output.replace_input_with(node, copy)


def changed(graph: fx.Graph, memory: Memory) -> list[list[fx.Node]]:
    """Returns the nodes that share memory which some node changes, with their readers.

    Such as a layer that keeps running statistics with its buffers, or an in-place activation with
    what it reads. What reads or shares it after the last change is left out: it is a value like any
    other then.
    """
    groups: dict[fx.Node, dict[fx.Node, None]] = defaultdict(dict)
    for node in graph.nodes:
        if node.op == "output" or not has_tensors(node) or not memory.changes(node):
            continue
        group = memory.group(node)
        if node.op != "placeholder" and not memory.is_final_at(group, node):  # all have inputs
            groups[group][node] = None
        for user in node.users:
            if user.op != "output" and has_tensors(user) and not memory.is_final_at(group, user):
                groups[group][user] = None
    return list(map(list, filter(None, groups.values())))


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

    ahead: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    behind: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in (each for each in graph.nodes if each.op == "call_function"):
        changed = written(node)
        if node.target not in _DETACHING and (changed or _is_floating(node.meta.get("val"))):
            for before, after in product(node.all_input_nodes, (node, *changed)):
                ahead[shared(before)].append(shared(after))
                behind[shared(after)].append(shared(before))
    attributes = {node: value_of(node) for node in graph.find_nodes(op="get_attr")}
    parameters = [
        shared(node)
        for node, value in attributes.items()
        if isinstance(value, torch.Tensor) and value.requires_grad
    ]
    returned = [shared(node) for node in graph.output_node().all_input_nodes]
    found = reached(parameters, ahead.__getitem__) & reached(returned, behind.__getitem__)
    return {
        node
        for node in graph.nodes
        if shared(node) in found
        and _is_floating(attributes[node] if node in attributes else node.meta.get("val"))
    }


def reached(
    starts: Iterable[fx.Node], following: Callable[[fx.Node], Iterable[fx.Node]]
) -> set[fx.Node]:
    """Returns some nodes, and all to which `following` leads from them."""
    open_ = list(starts)
    found = set(open_)
    while open_:
        new = set(following(open_.pop())) - found
        found |= new
        open_ += new
    return found


def _is_floating(value: Any) -> bool:
    return any(each.is_floating_point() or each.is_complex() for each in tensors(value))
