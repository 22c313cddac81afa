"""A number for a cut graph, by which tasks find out whether they have cut the same one."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from trireme.graph.execute.cut import Cut


def fingerprint(cut: Cut) -> str:
    """Returns a SHA-256 digest, in hexadecimal, of all in which a cut must agree among tasks.

    These are the segments with their operations, places and order, the values between them with
    shapes and dtypes, the inputs and the structure of the outputs. The contents of parameters are
    no part of it.
    """
    names: dict[Any, str] = {}
    digest = hashlib.sha256()

    def add(*parts: object) -> None:
        digest.update(repr(parts).encode())

    for given in cut.inputs:
        add(_tensor(given.shape, given.dtype, names) if isinstance(given, torch.Tensor) else given)
    for segment in cut.segments:
        add(segment.place, segment.depth, segment.part)
        add(segment.receives, segment.inputs, segment.outputs)
        add(segment.module.code)
    for value in cut.values.values():
        add(value.name, value.place, value.readers, value.differentiable, value.attribute)
        add(_tensor(value.shape, value.dtype, names))
    add(str(cut.nesting))
    return digest.hexdigest()


def _tensor(shape: Any, dtype: torch.dtype, names: dict[Any, str]) -> str:
    """Returns a text of a shape and dtype, in which symbols are numbered as they first appear."""
    sizes = []
    for size in shape:
        if isinstance(size, torch.SymInt):
            expression = size.node.expr
            for symbol in sorted(expression.free_symbols, key=str):
                names.setdefault(symbol, f"n{len(names)}")
            sizes.append(str(expression.subs(names)))
        else:
            sizes.append(str(int(size)))
    return f"{dtype}[{', '.join(sizes)}]"
