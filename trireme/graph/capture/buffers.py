"""Buffers that a graph changes in place and computes with, as `self.count += 1` in forward."""

from __future__ import annotations

from operator import attrgetter

import torch
from torch import fx, nn
from torch._ops import OpOverload

from trireme.graph.capture.effects import Memory, aliased, written


def remove_idle_copies(graph: fx.Graph) -> None:
    """Removes copies of a buffer to itself, which torch.export puts at the end of a graph.

    They would count as changes, after which autograd refuses to use the value in backward.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        target, source = node.args[:2]
        while isinstance(source, fx.Node) and _returns_first_argument(source):
            source = source.args[0]
        if source is target and not node.users:
            graph.erase_node(node)


def copy_for_backward(graph: fx.Graph, module: nn.Module) -> None:
    """Gives operations copies of the buffers that the graph changes.

    Autograd keeps what an operation reads, and the next micro-batch changes the buffer before this
    one's backward.
    """
    memory = Memory(graph, module)
    buffers = {id(each) for each in module.buffers()}
    groups = {
        memory.group(node)
        for node in graph.find_nodes(op="get_attr")
        if id(attrgetter(str(node.target))(module)) in buffers and memory.changes(node)
    }
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            continue
        spared = {*written(node), *aliased(node)}
        for each in node.all_input_nodes if len(node.all_input_nodes) > 1 else ():
            if each in spared or memory.group(each) not in groups:
                continue
            if not isinstance(each.meta.get("val"), torch.Tensor):
                continue
            with graph.inserting_before(node):
                copy = graph.call_function(torch.ops.aten.clone.default, (each,))
            copy.meta.update(node.meta, val=each.meta["val"])
            node.replace_input_with(each, copy)


def _returns_first_argument(node: fx.Node) -> bool:
    """Returns whether a node changes its first argument and returns it."""
    if not isinstance(node.target, OpOverload) or not node.args:
        return False
    returns = node.target._schema.returns
    info = returns[0].alias_info if len(returns) == 1 else None
    return info is not None and info.is_write and node.args[0] in written(node)
