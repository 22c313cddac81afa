"""Optimises captured graphs: dead code, common subexpressions, constants.

The graphs are those of training: parameters are no constants, layers change their buffers, dropout
draws random numbers, and operations may be in-place; `effects` says which nodes may be touched.
Dead code is torch's `Graph.eliminate_dead_code`. Its other passes do not fit such graphs:
`torch.fx.passes.dialect.common.cse_pass` compares arguments with `==`, so that it merges `x + 1`
with `x + 1.0`, and merges over in-place changes; `torch.fx.experimental.const_fold` and
`torch._inductor.constant_folding` take parameters and buffers for constants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.node import map_aggregate, map_arg

from trireme.graph.capture.capture import Capture
from trireme.graph.capture.effects import Memory, is_impure
from trireme.graph.capture.exporting import tensors
from trireme.graph.capture.rebuild import constants_of, copied, rebuild

_LARGEST = 64 * 2**20  # bytes; a larger constant costs more to keep and to send than to compute


def optimised(captured: Capture, devices: Mapping[str, str] | None = None) -> Capture:
    """Removes dead code, merges common subexpressions and folds constants.

    Random operators, and those that change memory (batch norm in training mode, in-place
    operations), stay as they are, even if nothing uses their result. So do regions under
    `torch.no_grad` and `torch.autocast`. Operators of different `devices`, as `scopes.requested`
    returns them, are not merged.
    """
    module = captured.module
    graph = copied(module.graph)  # it has no owner, so torch does not enter its regions
    graph.eliminate_dead_code(is_impure)
    _merge_common(graph, Memory(graph, module), devices or {})
    constants = _fold_constants(graph, module)
    return replace(captured, module=rebuild(module, graph, constants))


def _merge_common(graph: fx.Graph, memory: Memory, devices: Mapping[str, str]) -> None:
    """Merges nodes that apply the same operator to the same unchanged values."""
    first: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or is_impure(node) or not memory.is_private(node):
            continue
        if any(memory.changes(each) for each in node.all_input_nodes):
            continue
        key = node.target, _key((node.args, node.kwargs)), devices.get(node.name)
        kept = first.setdefault(key, node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            graph.erase_node(node)


def _key(arguments: Any) -> str:
    """Returns a text that is equal for equal arguments only: 1, 1.0 and True differ."""
    return repr(map_aggregate(arguments, lambda each: f"{type(each).__name__} {each!r}"))


def _fold_constants(graph: fx.Graph, module: fx.GraphModule) -> dict[str, torch.Tensor]:
    """Replaces operators on constants by their results, which it returns by their names.

    Constants are tensors that are neither parameters nor buffers, numbers, and what operators make
    of them alone (`arange`, `ones`). A value that a node changes, or that the caller gets, stays.
    """
    memory, sources = Memory(graph, module), constants_of(module, graph)
    values: dict[fx.Node, Any] = {
        node: value for node, value in sources.items() if memory.is_private(node)
    }
    folded: list[fx.Node] = []
    for node in graph.nodes:
        if _is_foldable(node, values) and memory.is_private(node):
            args, kwargs = map_arg((node.args, dict(node.kwargs)), values.__getitem__)
            # Not inference mode: autograd may save the constant for a backward pass.
            with torch.inference_mode(False), torch.no_grad():
                value = node.target(*args, **kwargs)
            if sum(each.untyped_storage().nbytes() for each in tensors(value)) <= _LARGEST:
                values[node] = value
                folded.append(node)
    constants: dict[str, torch.Tensor] = {}
    for node in folded:
        if isinstance(values[node], torch.Tensor) and any(it not in values for it in node.users):
            name = f"folded_{node.name}"
            constants[name] = values[node]
            with graph.inserting_before(node):
                # A graph without an owner cannot look the name up.
                constant = graph.create_node("get_attr", name)
            constant.meta = dict(node.meta)
            node.replace_all_uses_with(constant)
    for node in [*reversed(folded), *sources]:
        if not node.users:
            graph.erase_node(node)
    return constants


def _is_foldable(node: fx.Node, values: Mapping[fx.Node, Any]) -> bool:
    made = tensors(node.meta.get("val"))
    return (
        node.op == "call_function"
        and (isinstance(node.target, OpOverload) or node.target is getitem)
        and not is_impure(node)
        and all(each in values for each in node.all_input_nodes)
        # No number, and no symbol in its shape.
        and bool(made)
        and all(type(size) is int for each in made for size in each.shape)
    )
