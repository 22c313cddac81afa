"""Names of what lies in flat vectors: which parameter, and which bit of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


def by_parameter(layout: Layout, live: Sequence[Held]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the part of each parameter in tensors, with its name and the tensor's kind."""
    vectors = {vector.name: vector for vector in layout.vectors}
    for number, (spec, tensor) in enumerate(live):
        if spec.group >= 0:
            yield f"{spec.key} of parameter group {spec.group} ({number})", tensor
            continue
        for placed in vectors[spec.vector].placed:
            if found := placed.within(spec.start, spec.stop):
                part = tensor[found[0] - spec.start : found[1] - spec.start]
                yield f"{_kind(spec)}{placed.parameter.name!r}", part


def _kind(spec: TensorSpec) -> str:
    return "" if spec.key == "values" else f"{spec.key.removeprefix('state/')} of "
