"""Names of what lies in flat vectors: which parameter, and which bit of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from trireme.corruption.digests import Flip
from trireme.ps.layout import Layout
from trireme.ps.snapshot_messages import TensorSpec

Held: TypeAlias = tuple[TensorSpec, torch.Tensor]
"""A tensor, and what it is a part of."""


def values_of(layout: Layout, vectors: Sequence[torch.Tensor]) -> list[Held]:
    """Returns the flat vectors of values, each as a whole."""
    return [
        (TensorSpec("values", vector.dtype, vector.name, 0, vector.length), tensor)
        for vector, tensor in zip(layout.vectors, vectors, strict=True)
    ]


def described(layout: Layout, held: Sequence[Held], flip: Flip | None, every: str) -> str:
    """Returns which bit of which parameter has changed; of `every` one, where it is not one word.

    The flat vectors of a layout are in `held`, in the order of the tensors that were looked at.
    """
    if flip is None:
        return f"several words of {every}"
    spec, tensor = held[flip.tensor]
    element, bit = flip.within(tensor.element_size())
    name = f"{spec.key} of parameter group {spec.group}"
    for vector in layout.vectors:
        for placed in vector.placed if vector.name == spec.vector and spec.group < 0 else ():
            if placed.start <= spec.start + element < placed.end:
                name = f"{_kind(spec)}{placed.parameter.name!r}"
                return f"bit {bit} of element {spec.start + element - placed.start} of {name}"
    return f"bit {bit} of {name}"


def by_parameter(layout: Layout, live: Sequence[Held]) -> dict[str, torch.Tensor]:
    """Returns the part of each parameter in tensors, by its name and the tensor's kind, sorted.

    Copies of a shard may divide the optimizer's state otherwise. Of the numbers of a parameter
    group, which are mostly alike, one is taken.
    """
    vectors, found = {vector.name: vector for vector in layout.vectors}, dict[str, torch.Tensor]()
    for spec, tensor in live:
        if spec.group >= 0:
            found[f"{spec.key} of parameter group {spec.group}"] = tensor
            continue
        for placed in vectors[spec.vector].placed:
            if part := placed.within(spec.start, spec.stop):
                name = f"{_kind(spec)}{placed.parameter.name!r}"
                found[name] = tensor[part[0] - spec.start : part[1] - spec.start]
    return dict(sorted(found.items()))


def _kind(spec: TensorSpec) -> str:
    return "" if spec.key == "values" else f"{spec.key.removeprefix('state/')} of "
