"""The nodes of a graph that share memory which some node changes in place."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import fx

from trireme.graph.capture.effects import Memory

COPY = "trireme_copy"
"""The metadata of a copy of a returned buffer."""


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

    What reads or shares it after the last change is left out: it is a value like any other then.
    """
    groups: dict[fx.Node, dict[fx.Node, None]] = defaultdict(dict)
    for node in graph.nodes:
        if node.op != "output" and has_tensors(node) and memory.changes(node):
            found = groups[memory.group(node)]
            if node.op != "placeholder" and not memory.is_final(node):  # all places have inputs
                found[node] = None
            group = memory.group(node)
            found.update(
                dict.fromkeys(
                    each
                    for each in node.users
                    if each.op != "output"
                    and has_tensors(each)
                    and not memory.is_final_at(group, each)
                )
            )
    return [list(found) for found in groups.values() if found]


def has_tensors(node: fx.Node) -> bool:
    """Returns whether the value of a node is or has tensors, or is not known."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(each, torch.Tensor) for each in values) or value is None
