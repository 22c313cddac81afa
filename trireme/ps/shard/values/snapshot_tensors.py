"""The tensors of a snapshot or of a load: ranges of flat vectors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trireme.errors import Rejected
from trireme.ps.flat import PartBuffer, dtype_of
from trireme.ps.layout import Part
from trireme.ps.snapshot_messages import TensorSpec

Tensors = Sequence[tuple[TensorSpec, torch.Tensor]]  # the tensors of a snapshot's payload, in order


def ranges(
    key: str, parts: Sequence[Part], buffer: PartBuffer
) -> list[tuple[TensorSpec, torch.Tensor]]:
    """Returns a buffer's vectors, with their specs."""
    return [
        (TensorSpec(key, part.vector.dtype, part.vector.name, part.start, part.stop), tensor)
        for part, tensor in zip(parts, buffer.vectors, strict=True)
    ]


def fill(buffer: PartBuffer, parts: Sequence[Part], tensors: Tensors, key: str) -> int:
    """Copies the ranges of `key` into a buffer's parts; returns the number of elements."""
    covered = 0
    for spec, tensor in tensors:
        for part, target in zip(parts, buffer.vectors, strict=True):
            low, high = max(spec.start, part.start), min(spec.stop, part.stop)
            if spec.key == key and spec.vector == part.vector.name and low < high:
                source = tensor[low - spec.start : high - spec.start]
                target[low - part.start : high - part.start] = source
                covered += high - low
    return covered


def tensors_from(specs: Sequence[TensorSpec], payload: Sequence[memoryview]) -> Tensors:
    """Returns the tensors of a snapshot's or load's payload, as views into it."""
    joined = payload[0] if len(payload) == 1 else memoryview(bytearray().join(payload))
    tensors: list[tuple[TensorSpec, torch.Tensor]] = []
    offset = 0
    for spec in specs:
        known = isinstance(getattr(torch, spec.dtype, None), torch.dtype)
        if spec.stop < spec.start or not known:
            raise Rejected(f"a tensor of the payload makes no sense: {spec}")
        dtype = dtype_of(spec.dtype)
        count = 1 if spec.group >= 0 else spec.stop - spec.start
        size = count * dtype.itemsize
        if offset + size > joined.nbytes:
            raise Rejected(f"the payload ends at {joined.nbytes} bytes, inside {spec.key}")
        piece = joined[offset : offset + size]
        tensor = torch.frombuffer(piece, dtype=dtype) if size else torch.empty(0, dtype=dtype)
        tensors.append((spec, tensor.reshape(()) if spec.group >= 0 else tensor))
        offset += size
    if offset != joined.nbytes:
        raise Rejected(f"the payload has {joined.nbytes} bytes and its tensors {offset}")
    return tensors
