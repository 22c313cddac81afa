"""Names of what lies in flat vectors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trireme.ps.layout import Layout
from trireme.ps.snapshot_messages import TensorSpec


def by_parameter(
    layout: Layout, held: Sequence[tuple[TensorSpec, torch.Tensor]]
) -> list[tuple[str, torch.Tensor]]:
    """Returns the part of each parameter in tensors, with the padding behind it, by its name.

    They are sorted, as copies of a shard may divide the optimizer's state otherwise. Numbers of a
    parameter group have one name, for each range that they hold for.
    """
    vectors, found = {vector.name: vector for vector in layout.vectors}, []
    for spec, tensor in held:
        if spec.group >= 0:
            found.append((f"{spec.key} of parameter group {spec.group}", tensor))
            continue
        kind = "" if spec.key == "values" else f"{spec.key.removeprefix('state/')} of "
        for placed in vectors[spec.vector].placed:
            if part := placed.within(spec.start, spec.stop):
                named = f"{kind}{placed.parameter.name!r}"
                found.append((named, tensor[part[0] - spec.start : part[1] - spec.start]))
    return sorted(found, key=lambda each: each[0])
