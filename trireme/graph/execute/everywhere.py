"""The nodes that every place computes for itself."""

from __future__ import annotations

from collections.abc import Collection
from operator import attrgetter, getitem

import torch
from torch import fx
from torch._ops import OpOverload

from trireme.graph.capture.effects import Memory, is_impure
from trireme.graph.capture.rebuild import constants_of
from trireme.graph.execute.changed_memory import has_tensors


def everywhere(graph: fx.Graph, memory: Memory, module: fx.GraphModule) -> set[fx.Node]:
    """Returns the model's inputs, constants, the sizes of tensors, and views of all these."""
    constants = constants_of(module, graph)
    found = {
        node
        for node in graph.nodes
        if node.op == "placeholder"
        or (node in constants and not memory.changes(node))
        or (
            node.op == "get_attr"
            and not isinstance(attrgetter(str(node.target))(module), torch.Tensor)
        )
        or (node.op == "call_function" and not has_tensors(node))
    }
    return found | _views_of(graph, found, memory)


def _views_of(graph: fx.Graph, had: Collection[fx.Node], memory: Memory) -> set[fx.Node]:
    """Returns the nodes that are views of given nodes, or of such views.

    A view takes no time, wherever it is made: such as the half of the inputs that a tower reads.
    Views of memory that some node changes are left out.
    """
    found: set[fx.Node] = set()
    known = set(had)
    for node in graph.nodes:
        if node.op != "call_function" or not _is_view(node) or memory.changes(node):
            continue
        if node.all_input_nodes and all(each in known for each in node.all_input_nodes):
            found.add(node)
            known.add(node)
    return found


def _is_view(node: fx.Node) -> bool:
    if node.target is getitem:
        return True
    if not isinstance(node.target, OpOverload) or is_impure(node):
        return False
    shared = [each.alias_info for each in node.target._schema.returns]
    return bool(shared) and all(each is not None and not each.is_write for each in shared)
