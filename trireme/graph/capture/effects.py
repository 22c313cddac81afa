"""What operators do besides computing a value: draw random numbers, change memory, share memory.

The graphs of `capture` are not functional: layers change their buffers, and in-place
operations stay in-place. A pass that moves, merges or removes nodes asks here first. The schemas of
torch's operators answer most questions; the tables below are for what schemas do not say.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx.node import map_arg

_STATISTICS = ("running_mean", "running_var")

_NORMS = {
    "aten::batch_norm": "training",
    "aten::native_batch_norm": "training",
    "aten::cudnn_batch_norm": "training",
    "aten::miopen_batch_norm": "training",
    "aten::_batch_norm_impl_index": "training",
    "aten::instance_norm": "use_input_stats",
}
"""Operators that change their running statistics, which their schemas do not say, and the argument
that switches it on."""

# fmt: off
_FRESH = frozenset([
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "avg_pool1d",
    "batch_norm", "bilinear", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
    "conv_transpose2d", "conv_transpose3d", "cosine_similarity", "cross_entropy_loss",
    "group_norm", "gru", "instance_norm", "item", "l1_loss", "layer_norm", "linear",
    "log_softmax", "lstm", "matmul", "max_pool1d", "max_pool2d", "max_pool3d", "nll_loss_nd",
    "one_hot", "rms_norm", "rnn_relu", "rnn_tanh", "scaled_dot_product_attention", "softmax",
    "sym_numel", "sym_size", "tile",
])
# fmt: on
"""Composite operators that always return memory of their own. Any other composite operator may
return its input or a view of it, which schemas do not say of them (`dropout` in evaluation)."""


def argument(node: fx.Node, name: str) -> Any:
    """Returns the value of an operator's argument by its name; None for one it does not have."""
    if name in node.kwargs:
        return node.kwargs[name]
    assert isinstance(node.target, OpOverload)
    for position, each in enumerate(node.target._schema.arguments):
        if each.name == name:
            return node.args[position] if position < len(node.args) else each.default_value
    return None


def is_random(node: fx.Node) -> bool:
    """Returns whether a node draws from a random generator; dropout in evaluation does not."""
    if not _may_be_random(node):
        return False
    if argument(node, "train") is False or argument(node, "training") is False:
        return False
    shares = [argument(node, name) for name in ("dropout", "dropout_p")]
    return not any(share == 0 for share in shares if isinstance(share, int | float))


def is_opaque(node: fx.Node) -> bool:
    """Returns whether nothing is known of a node, as of regions under `torch.no_grad`."""
    if node.op in ("call_module", "call_method"):
        return True
    target = node.target
    if node.op != "call_function" or isinstance(target, OpOverload):
        return False
    if isinstance(target, HigherOrderOperator):
        return True
    return not _is_arithmetic(target)


def written(node: fx.Node) -> list[fx.Node]:
    """Returns the inputs whose memory a node changes."""
    if is_opaque(node):
        return list(node.all_input_nodes)
    target = node.target
    if not isinstance(target, OpOverload):
        return []
    changed = [
        each.name
        for each in target._schema.arguments
        if each.alias_info is not None and each.alias_info.is_write
    ]
    switch = _NORMS.get(target._schema.name)
    if switch and argument(node, switch) is not False:
        changed += _STATISTICS
    return _nodes(argument(node, name) for name in changed)


def is_impure(node: fx.Node) -> bool:
    """Returns whether a node is never removed, merged or folded: it has effects, or is a check."""
    if is_random(node) or is_opaque(node) or written(node):
        return True
    # torch takes dropout for random in evaluation mode too.
    return not _may_be_random(node) and node.is_impure()


def aliased(node: fx.Node) -> list[fx.Node]:
    """Returns the inputs that a node's value may share memory with."""
    if is_opaque(node):
        return list(node.all_input_nodes)
    target = node.target
    if target is operator.getitem:
        return _nodes(node.args[:1])
    if not isinstance(target, OpOverload):
        return []
    schema = target._schema
    if any(each.alias_info is not None for each in schema.returns):
        shared = [each.name for each in schema.arguments if each.alias_info is not None]
        return _nodes(argument(node, name) for name in shared)
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(
        target.name(),  # type: ignore[no-untyped-call]
        "CompositeImplicitAutograd",
    )
    unknown = composite and schema.name.removeprefix("aten::") not in _FRESH
    return list(node.all_input_nodes) if unknown else []


class Memory:
    """Which values of a graph may share memory, and which memory is changed or returned.

    Two values that may share memory are of one group. The order of nodes plays no part: a value
    counts as changed if any node of the graph changes it.
    """

    def __init__(self, graph: fx.Graph, module: nn.Module) -> None:
        self._above: dict[fx.Node, fx.Node] = {}
        storages: dict[int, fx.Node] = {}
        inputs = graph.find_nodes(op="placeholder")
        for node in inputs:  # a caller may give the same memory several times
            self._unite(node, inputs[0])
        for node in graph.nodes:
            if node.op == "get_attr":
                value = attrgetter(str(node.target))(module)
                if isinstance(value, torch.Tensor):
                    storage = value.untyped_storage()._cdata
                    self._unite(node, storages.setdefault(storage, node))
            elif node.op not in ("placeholder", "output"):
                for each in aliased(node):
                    self._unite(node, each)
        # The place of each change in the graph, by the group whose memory it changes.
        self._place = {node: place for place, node in enumerate(graph.nodes)}
        self._changes: dict[fx.Node, list[int]] = {}
        for node in graph.nodes:
            for group in {self.group(each) for each in written(node)}:
                self._changes.setdefault(group, []).append(self._place[node])
        given = [node for node in graph.nodes if node.op in ("get_attr", "placeholder")]
        self._lasting = {self.group(each) for each in given}
        returned = graph.output_node().all_input_nodes
        self._returned = {self.group(each) for each in returned}

    def group(self, node: fx.Node) -> fx.Node:
        """Returns the node that stands for the group of a node."""
        while (above := self._above.get(node, node)) is not node:
            node = above
        return node

    def is_private(self, node: fx.Node) -> bool:
        """Returns whether no node changes the memory of a value, and the caller does not get it."""
        group = self.group(node)
        return group not in self._changes and group not in self._returned

    def changes(self, node: fx.Node) -> bool:
        """Returns whether some node of the graph changes a value's memory."""
        return self.group(node) in self._changes

    def is_final_at(self, group: fx.Node, node: fx.Node) -> bool:
        """Returns whether no node changes the memory of a group from another node on.

        Memory that is there before the graph is computed, or afterwards, is never final: parameters
        and buffers change from batch to batch, and inputs belong to the caller.
        """
        return group not in self._lasting and self._changes[group][-1] < self._place[node]

    def _unite(self, first: fx.Node, second: fx.Node) -> None:
        self._above[self.group(first)] = self.group(second)


def _may_be_random(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def _is_arithmetic(target: Any) -> bool:
    name = getattr(target, "__name__", "")
    known = getattr(operator, name, None) is target or getattr(math, name, None) is target
    symbolic = name.startswith("sym_") and getattr(torch, name, None) is target
    return symbolic or (known and name != "setitem")


def _nodes(values: Iterable[Any]) -> list[fx.Node]:
    found: list[fx.Node] = []
    for value in values:
        map_arg(value, lambda each: found.append(each))
    return found
