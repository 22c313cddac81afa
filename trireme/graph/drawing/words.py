"""Nodes, durations and sizes as words, in the units of the pictures."""

from __future__ import annotations

from typing import Any

import torch
from rich.filesize import pick_unit_and_suffix
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

from trireme.graph.capture.source import scope

_NO_SCOPE = "_empty_nn_module_stack"  # torch's name of a scope where it knows none


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


def milliseconds(seconds: float) -> str:
    """Returns a duration in milliseconds with three digits, such as `0.0123` or `1,234`."""
    value = seconds * 1000
    if value == 0:
        return "0"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value >= 0.001 else "<0.001"


def duration(seconds: float) -> str:
    """Returns a duration with its unit, such as `12.3 ms` or `1.5 s`."""
    return f"{milliseconds(seconds)} ms" if seconds < 1 else f"{seconds:,.3g} s"


def size(nbytes: float) -> str:
    """Returns a number of bytes with its unit, such as `1.5 MiB`."""
    unit, name = pick_unit_and_suffix(int(nbytes), ["B", "KiB", "MiB", "GiB"], 1024)
    return f"{nbytes / unit:.{0 if unit == 1 else 1}f} {name}"


def count(number: int, what: str, ending: str = "s") -> str:
    """Returns a number with its noun, such as `1 operator` or `2 operators`."""
    return f"{number:,} {what}{'' if number == 1 else ending}"


def scope_of(node: fx.Node) -> str:
    """Returns the path of a node's module, that of the owner for a parameter; "" if unknown."""
    if node.op == "get_attr":
        return str(node.target).rpartition(".")[0]
    path = scope(node)
    return "" if path.startswith(_NO_SCOPE) else path
