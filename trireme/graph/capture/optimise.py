"""Optimises captured graphs: dead code, constants, attributes, common subexpressions.

The graphs are those of training: parameters are no constants, layers change their buffers, dropout
draws random numbers, and operations may be in-place. `effects` says which nodes a
pass may touch. Outputs, gradients and running statistics stay the same.

Dead code is torch's `Graph.eliminate_dead_code`, with the purity of `effects`: torch
takes batch norm in training for pure. Torch's other passes do not fit graphs of training:

- `torch.fx.passes.dialect.common.cse_pass` compares arguments with `==`, so that it merges `x + 1`
  with `x + 1.0`, of another dtype. It merges over in-place changes, and loses the nesting of inputs
  and outputs.
- `torch.fx.experimental.const_fold` and `torch._inductor.constant_folding` take parameters and
  buffers for constants. The first makes parameters of what it folds.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter, getitem
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload
from torch.fx.node import map_arg

from trireme.graph.capture.capture import Capture
from trireme.graph.capture.effects import Memory, is_impure
from trireme.graph.capture.rebuild import constants_of, copied, rebuild

_LARGEST = 64 * 2**20  # bytes; a larger constant costs more to keep and to send than to compute


@dataclass(frozen=True, slots=True)
class PassCount:
    """What one pass did."""

    name: str  # `dead code`, `constants`, `attributes` or `common subexpressions`
    # the number of operators (`call_function` nodes) before the pass; that of names of tensors
    # (`get_attr` nodes) for `attributes`
    before: int
    after: int  # the same number after the pass


@dataclass(frozen=True, eq=False)
class Optimised:
    """An optimised graph, and what each pass did, in order."""

    capture: Capture  # the graph, with the parameters and buffers of the one that was given
    passes: tuple[PassCount, ...]  # the counts of each pass


def optimise(
    captured: Capture,
    *,
    largest_constant: int = _LARGEST,
    devices: Mapping[str, str] | None = None,
) -> Optimised:
    """Removes dead code, folds constants and merges common subexpressions.

    Random operators, and those that change memory (batch norm in training mode, in-place
    operations), stay as they are, even if nothing uses their result. So do regions under
    `torch.no_grad` and `torch.autocast`.
    """
    module = captured.module
    graph = copied(module.graph)  # it has no owner, so torch does not enter its regions
    constants: dict[str, torch.Tensor] = {}

    def fold(graph: fx.Graph) -> None:
        constants.update(fold_constants(graph, module, largest_constant))

    def merge(graph: fx.Graph) -> None:
        merge_common(graph, module, constants, devices)

    def share(graph: fx.Graph) -> None:
        share_attributes(graph, module, constants)

    steps: list[tuple[str, Callable[[fx.Graph], object], Callable[[fx.Graph], int]]] = [
        ("dead code", remove_dead_code, operators),
        ("constants", fold, operators),
        ("attributes", share, attributes),
        ("common subexpressions", merge, operators),
    ]
    passes = []
    for name, step, count in steps:
        before = count(graph)
        step(graph)
        passes.append(PassCount(name, before, count(graph)))
    used = {node.target for node in graph.find_nodes(op="get_attr")}
    kept = {name: value for name, value in constants.items() if name in used}
    return Optimised(replace(captured, module=rebuild(module, graph, kept)), tuple(passes))


def operators(graph: fx.Graph) -> int:
    """Returns the number of operators of a graph: its `call_function` nodes."""
    return Counter(node.op for node in graph.nodes)["call_function"]


def attributes(graph: fx.Graph) -> int:
    """Returns how often a graph names a tensor: the number of its `get_attr` nodes."""
    return len(graph.find_nodes(op="get_attr"))


def remove_dead_code(graph: fx.Graph) -> None:
    """Removes nodes whose value nothing uses and that do nothing else. Changes the graph."""
    graph.eliminate_dead_code(is_impure)


def fold_constants(
    graph: fx.Graph, module: nn.Module, largest: int = _LARGEST
) -> dict[str, torch.Tensor]:
    """Replaces operators on constants by their results. Changes the graph.

    Constants are tensors that are neither parameters nor buffers, numbers, and what operators make
    of them alone (`arange`, `ones`). A value that a node changes, or that the caller gets, stays.
    """
    memory = Memory(graph, _values(module, {}))
    sources = constants_of(module, graph)
    values: dict[fx.Node, Any] = {
        node: value for node, value in sources.items() if memory.is_private(node)
    }
    folded: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if _is_foldable(node, values) and memory.is_private(node):
            value = _computed(node, values)
            if _bytes(value) <= largest:
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


def share_attributes(
    graph: fx.Graph, module: nn.Module, constants: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Merges nodes that name the same tensor, or constants of the same bits. Changes the graph.

    A constant that a node changes, or that the caller gets, is the same as itself only.
    """
    added = constants or {}
    value_of = _values(module, added)
    memory = Memory(graph, value_of)
    fixed = constants_of(module, graph, added)
    first: dict[Any, fx.Node] = {}
    for node in graph.find_nodes(op="get_attr"):
        value = value_of(node)
        key: Any = id(value)
        if node in fixed and memory.is_private(node):
            key = (value.dtype, value.device, value.shape, value.stride(), _bits(value))
        kept = first.setdefault(key, node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            graph.erase_node(node)


def merge_common(
    graph: fx.Graph,
    module: nn.Module,
    constants: Mapping[str, torch.Tensor] | None = None,
    devices: Mapping[str, str] | None = None,
) -> None:
    """Merges nodes that apply the same operator to the same values. Changes the graph.

    Values are the same only if no node has changed their memory in between. A result whose memory
    a node changes, or that the caller gets, is not merged.
    """
    places = devices or {}
    memory = Memory(graph, _values(module, constants or {}))
    changes = memory.changes_before
    first: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or is_impure(node) or not memory.is_private(node):
            continue
        versions = tuple(changes(node, each) for each in node.all_input_nodes)
        key = (node.target, _key(node.args), _key(node.kwargs), versions, places.get(node.name))
        kept = first.setdefault(key, node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            graph.erase_node(node)


def _values(module: nn.Module, constants: Mapping[str, torch.Tensor]) -> Callable[[fx.Node], Any]:
    """Returns the function that gives the value of a `get_attr` node."""

    def value_of(node: fx.Node) -> Any:
        name = str(node.target)
        return constants[name] if name in constants else attrgetter(name)(module)

    return value_of


def _bits(value: torch.Tensor) -> bytes:
    """Returns the elements of a tensor as bytes: 0.0 and -0.0 differ, and a NaN equals itself."""
    flat = value.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


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


def _unused_name(module: nn.Module, constants: dict[str, torch.Tensor]) -> str:
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
