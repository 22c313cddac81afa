"""A captured graph as text, grouped by the modules of the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

from trireme.graph.capture.optimise import PassCount
from trireme.graph.capture.source import scope, source_line


def listing(graph: fx.Graph) -> str:
    """Returns a line for each operator: its name, operator, shape and dtype, and source line.

    Lines are below the name of their module, indented by its depth, in the order of execution. A
    module is named again when it goes on after another one. `?` stands for a shape that no
    metadata gives.
    """
    lines: list[str] = []
    last: tuple[str, ...] = ()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        path = tuple(each for each in scope(node).split(".") if each)
        if path != last:
            common = next(
                (i for i, pair in enumerate(zip(path, last, strict=False)) if pair[0] != pair[1]),
                min(len(path), len(last)),
            )
            start = common if len(path) > common else max(len(path) - 1, 0)
            lines += ["  " * depth + path[depth] for depth in range(start, len(path))]
            last = path
        lines.append("  " * len(path) + "  ".join(_columns(node)))
    return "\n".join(lines)


def summary(passes: tuple[PassCount, ...]) -> str:
    """Returns a line for each pass, with the number of operators before and after it."""
    width = max((len(each.name) for each in passes), default=0)
    return "\n".join(f"{each.name:<{width}}  {each.before} -> {each.after}" for each in passes)


def operator_name(node: fx.Node) -> str:
    """Returns the name of a node's operator, as `aten.linear` or `getitem`."""
    target = node.target
    if isinstance(target, OpOverload | HigherOrderOperator):
        name = target.name().replace("::", ".")  # type: ignore[no-untyped-call]
        return str(name).removesuffix(".default")
    return str(getattr(target, "__name__", target))


def shape_text(value: Any) -> str:
    """Returns the dtype and shape of a value of a node's metadata, as `float32[s0, 10]`."""
    if isinstance(value, torch.Tensor):
        sizes = ", ".join(str(size) for size in value.shape)
        return f"{str(value.dtype).removeprefix('torch.')}[{sizes}]"
    if isinstance(value, tuple | list):
        return f"({', '.join(shape_text(each) for each in value)})"
    return "?" if value is None else str(value)


def _columns(node: fx.Node) -> Iterator[str]:
    yield node.name
    yield operator_name(node)
    yield shape_text(node.meta.get("val"))
    if line := source_line(node):
        yield str(line)
