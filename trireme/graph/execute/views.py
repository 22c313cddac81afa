"""Views of what every task has: each task makes them for itself, and none is sent."""

from __future__ import annotations

from collections.abc import Collection
from operator import getitem

from torch import fx
from torch._ops import OpOverload

from trireme.graph.capture.effects import Memory, is_impure


def views_of(graph: fx.Graph, had: Collection[fx.Node], memory: Memory) -> set[fx.Node]:
    """Returns the nodes that are views of given nodes, or of such views.

    A view takes no time, wherever it is made: such as the half of the inputs that a tower reads.
    Views of memory that some node changes are left out.

    Args:
        graph: the graph.
        had: nodes that every task has, such as the model's inputs.
        memory: the graph's memory.
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
