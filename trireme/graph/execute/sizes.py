"""Sizes of tensors that depend on the batch size: in a graph, and as numbers for given inputs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache, reduce
from typing import Any

import torch
from torch import fx

from trireme.errors import ConfigurationError

_SIZES = frozenset([torch.ops.aten.sym_size.int, torch.ops.aten.sym_numel.default])


def read_sizes_of_inputs(graph: fx.Graph) -> None:
    """Computes each size in a graph from the sizes of the inputs, and from no other tensor."""
    inputs = graph.find_nodes(op="placeholder")
    known: dict[Any, tuple[fx.Node, int]] = {}
    size: Any
    for node in inputs:
        value = node.meta.get("val")
        for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if _is_symbol(size):
                known.setdefault(size.node.expr, (node, dim))
    for node in list(graph.nodes):
        size = node.meta.get("val")
        if node.target not in _SIZES or node.args[0] in inputs or not _is_symbol(size):
            continue
        with graph.inserting_before(node):
            same = _computed(graph, size.node.expr, known, node)
        node.replace_all_uses_with(same)
        graph.erase_node(node)


def _is_symbol(size: Any) -> bool:
    return isinstance(size, torch.SymInt)


@cache
def _operators() -> Mapping[type, Callable[[Any, Any], Any]]:
    """Returns what computes each kind of expression from two parts."""
    import sympy  # type: ignore[import-untyped]  # loads slowly, and every session imports this
    from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod

    return {
        sympy.Add: operator.add,
        sympy.Mul: operator.mul,
        FloorDiv: operator.floordiv,
        Mod: operator.mod,
        PythonMod: operator.mod,
    }


def _computed(
    graph: fx.Graph, expression: Any, known: Mapping[Any, tuple[fx.Node, int]], node: fx.Node
) -> Any:
    """Returns a new node that computes an expression, or its value if it is a number."""
    if expression in known:
        made = graph.call_function(torch.ops.aten.sym_size.int, known[expression])
    elif expression.is_Integer:
        return int(expression)
    elif (function := _operators().get(type(expression))) is not None:
        parts = [_computed(graph, each, known, node) for each in expression.args]

        def joined(one: Any, other: Any) -> fx.Node:
            both = graph.call_function(function, (one, other))
            both.meta["val"] = node.meta["val"]  # what matters of it is that it is no tensor
            return both

        made = reduce(joined, parts)
    else:
        raise ConfigurationError(
            f"the size {expression} of {node.args[0]} does not follow from the sizes of the "
            "model's inputs: it depends on values, and a graph that is cut has no such sizes. "
            "Compute it with tensors of a fixed size and a mask"
        )
    made.meta.update(node.meta)
    return made


def symbols(fakes: Sequence[Any], inputs: Sequence[Any]) -> dict[Any, int]:
    """Returns the numbers for the symbolic sizes of a graph's inputs."""
    found: dict[Any, int] = {}
    size: Any
    for fake, given in zip(fakes, inputs, strict=True):
        if isinstance(fake, torch.Tensor):
            for size, actual in zip(fake.shape, given.shape, strict=True):
                if _is_symbol(size):
                    found[size.node.expr] = actual
    return found


def numbers(shape: Sequence[Any], known: Mapping[Any, int]) -> tuple[int, ...]:
    """Returns a shape as numbers."""
    return tuple(
        int(size.node.expr.subs(known)) if _is_symbol(size) else int(size) for size in shape
    )
