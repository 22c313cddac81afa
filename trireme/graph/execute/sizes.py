"""Sizes of tensors that depend on the batch size: in a graph, and as numbers for given inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from trireme.errors import ConfigurationError

_SIZE = torch.ops.aten.sym_size.int
_SIZES = frozenset([_SIZE, torch.ops.aten.sym_numel.default])


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
            same = _computed(graph, node, known)
        node.replace_all_uses_with(same)
        graph.erase_node(node)


def _is_symbol(size: Any) -> bool:
    return isinstance(size, torch.SymInt)


def _computed(graph: fx.Graph, node: fx.Node, known: Mapping[Any, tuple[fx.Node, int]]) -> fx.Node:
    # These load slowly, and every session imports this.
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    expression = node.meta["val"].node.expr
    parts = {expression} if expression in known else expression.free_symbols & known.keys()
    before = set(graph.nodes)
    sizes = {part: graph.call_function(_SIZE, known[part]) for part in parts}
    made = sizes.get(expression)
    if made is None:
        proxies = {part: fx.Proxy(size) for part, size in sizes.items()}
        try:
            made = sympy_interp(PythonReferenceAnalysis, proxies, expression).node
        except (KeyError, NotImplementedError) as error:
            raise ConfigurationError(
                f"the size {expression} of {node.args[0]} does not follow from the sizes of the "
                "model's inputs: it depends on values, and a graph that is cut has no such sizes. "
                "Compute it with tensors of a fixed size and a mask"
            ) from error
    for each in set(graph.nodes) - before:
        each.meta.update(node.meta)  # what matters of the value is that it is no tensor
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
