"""Nodes of a captured graph as words: the operator, and the dtype and shape of the value."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload


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
