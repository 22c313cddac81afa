"""Optimises captured graphs: dead code, common subexpressions, constants.

The graphs are those of training: parameters are no constants, layers change their buffers, dropout
draws random numbers, and operations may be in-place; `effects` says which nodes a pass may touch.
Dead code is torch's `Graph.eliminate_dead_code`. Its other passes do not fit such graphs:
`torch.fx.passes.dialect.common.cse_pass` compares arguments with `==`, so that it merges `x + 1`
with `x + 1.0`, and merges over in-place changes; `torch.fx.experimental.const_fold` and
`torch._inductor.constant_folding` take parameters and buffers for constants.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.node import map_arg

from trireme.graph.capture.capture import Capture
from trireme.graph.capture.effects import Memory, is_impure
from trireme.graph.capture.rebuild import constants_of, copied, rebuild

_LARGEST = 64 * 2**20  # bytes; a larger constant costs more to keep and to send than to compute


@dataclass(frozen=True, slots=True)
class PassCount:
    """What one pass did: the number of operators (`call_function` nodes) before and after it."""

    name: str  # `dead code`, `common subexpressions` or `constants`
    before: int
    after: int


@dataclass(frozen=True, eq=False)
class Optimised:
    """An optimised graph, with the parameters and buffers of the one that was given."""

    capture: Capture
    passes: tuple[PassCount, ...]  # in order


def optimise(captured: Capture, *, devices: Mapping[str, str] | None = None) -> Optimised:
    """Removes dead code, merges common subexpressions and folds constants.

    Random operators, and those that change memory (batch norm in training mode, in-place
    operations), stay as they are, even if nothing uses their result. So do regions under
    `torch.no_grad` and `torch.autocast`. Operators of different `devices`, as `scopes.requested`
    returns them, are not merged.
    """
    module, passes = captured.module, []
    for name, apply in (
        ("dead code", _remove_dead_code),
        ("common subexpressions", partial(_merge_common, devices=devices or {})),
        ("constants", _fold_constants),
    ):
        graph = copied(module.graph)  # it has no owner, so torch does not enter its regions
        before = operators(graph)
        module = rebuild(module, graph, apply(graph, module))
        passes.append(PassCount(name, before, operators(graph)))
    return Optimised(replace(captured, module=module), tuple(passes))


def operators(graph: fx.Graph) -> int:
    """Returns the number of operators of a graph: its `call_function` nodes."""
    return Counter(node.op for node in graph.nodes)["call_function"]


def _remove_dead_code(graph: fx.Graph, module: fx.GraphModule) -> Mapping[str, torch.Tensor]:
    """Removes nodes whose value nothing uses and that do nothing else."""
    graph.eliminate_dead_code(is_impure)
    return {}


def _merge_common(
    graph: fx.Graph, module: fx.GraphModule, devices: Mapping[str, str]
) -> Mapping[str, torch.Tensor]:
    """Merges nodes that apply the same operator to the same values.

    Values are the same only if no node has changed their memory in between. A result whose memory
    a node changes, or that the caller gets, is not merged.
    """
    memory = Memory(graph, module)
    changes = memory.changes_before
    first: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or is_impure(node) or not memory.is_private(node):
            continue
        versions = tuple(changes(node, each) for each in node.all_input_nodes)
        key = (node.target, _key(node.args), _key(node.kwargs), versions, devices.get(node.name))
        kept = first.setdefault(key, node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            graph.erase_node(node)
    return {}


def _fold_constants(graph: fx.Graph, module: fx.GraphModule) -> Mapping[str, torch.Tensor]:
    """Replaces operators on constants by their results, which it returns by their names.

    Constants are tensors that are neither parameters nor buffers, numbers, and what operators make
    of them alone (`arange`, `ones`). A value that a node changes, or that the caller gets, stays.
    """
    memory = Memory(graph, module)
    sources = constants_of(module, graph)
    values: dict[fx.Node, Any] = {
        node: value for node, value in sources.items() if memory.is_private(node)
    }
    folded: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if _is_foldable(node, values) and memory.is_private(node):
            value = _computed(node, values)
            if _bytes(value) <= _LARGEST:
                values[node] = folded[node] = value
    constants: dict[str, torch.Tensor] = {}
    for node, value in folded.items():
        if isinstance(value, torch.Tensor) and any(user not in folded for user in node.users):
            name = _unused_name(module, constants)
            constants[name] = value
            with graph.inserting_before(node):
                # A graph without an owner cannot look the name up.
                constant = graph.create_node("get_attr", name)
            constant.meta = copy.copy(node.meta)
            node.replace_all_uses_with(constant)
    for node in [*reversed(folded), *sources]:
        if not node.users:
            graph.erase_node(node)
    return constants


def _is_foldable(node: fx.Node, values: dict[fx.Node, Any]) -> bool:
    return (
        node.op == "call_function"
        and (isinstance(node.target, OpOverload) or node.target is getitem)
        and not is_impure(node)
        and all(each in values for each in node.all_input_nodes)
        and _is_fixed(node)
    )


def _is_fixed(node: fx.Node) -> bool:
    """Returns whether a node's value has no symbol in its shape, and is no number."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        sizes: list[Any] = list(value.shape)
        return all(type(size) is int for size in sizes)
    return isinstance(value, tuple | list)


def _computed(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    assert callable(node.target)
    args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda each: values[each])
    # Not inference mode: autograd may save the constant for a backward pass.
    with torch.inference_mode(False), torch.no_grad():
        return node.target(*args, **kwargs)


def _bytes(value: Any) -> int:
    parts = value if isinstance(value, tuple | list) else [value]
    return sum(each.untyped_storage().nbytes() for each in parts if isinstance(each, torch.Tensor))


def _unused_name(module: fx.GraphModule, constants: Mapping[str, torch.Tensor]) -> str:
    number = len(constants)
    while hasattr(module, f"folded_{number}") or f"folded_{number}" in constants:
        number += 1
    return f"folded_{number}"


def _key(value: Any) -> Any:
    """Returns a key that is equal for equal arguments only: 1, 1.0 and True differ."""
    if isinstance(value, fx.Node):
        return value
    if isinstance(value, tuple | list):
        return (isinstance(value, list), *(_key(each) for each in value))
    if isinstance(value, dict):
        return tuple((name, _key(each)) for name, each in sorted(value.items()))
    if isinstance(value, slice):
        return ("slice", _key(value.start), _key(value.stop), _key(value.step))
    return (type(value), repr(value))
