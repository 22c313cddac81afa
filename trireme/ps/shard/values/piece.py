"""Pieces of a shard's flat segments, each of which is updated at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from trireme.ps.flat import PartBuffer, dtype_of
from trireme.ps.layout import Segment
from trireme.ps.shard.values.snapshot_tensors import Tensors


@dataclass(slots=True, frozen=True, eq=False)
class Piece:
    """Elements that are updated together, with state of their own."""

    place: int  # the position of its segment in the part
    segment: Segment
    start: int  # its elements of the vector
    stop: int
    values: torch.Tensor
    positions: frozenset[int]  # of its parameters

    @property
    def is_whole(self) -> bool:
        return self.stop - self.start == self.segment.stop - self.segment.start

    def gradient(self, gradients: PartBuffer) -> torch.Tensor:
        whole = gradients.segments[self.place]
        if self.is_whole:
            return whole
        return whole[self.start - self.segment.start : self.stop - self.segment.start]

    def parameters(self) -> Iterator[Piece]:
        for placed in self.segment.vector.placed:
            if found := placed.within(self.start, self.stop):
                values = self.values[found[0] - self.start : found[1] - self.start]
                only = frozenset({placed.position})
                yield replace(self, start=found[0], stop=found[1], values=values, positions=only)

    def of(self, state: Tensors) -> Tensors:
        return [
            (spec, value)
            for spec, value in state
            if spec.vector == self.segment.vector.name
            and spec.group in (-1, self.segment.group)
            and spec.start < self.stop
            and self.start < spec.stop
        ]

    def joined(self, state: Tensors) -> dict[str, torch.Tensor]:
        """Returns its state by name, put together from ranges of its flat vector."""
        tensors: dict[str, torch.Tensor] = {}
        for spec, value in self.of(state):
            name = spec.key.removeprefix("state/")
            if spec.group >= 0:
                tensors[name] = value.reshape(()).clone()
                continue
            if name not in tensors:
                tensors[name] = torch.zeros(self.stop - self.start, dtype=dtype_of(spec.dtype))
            low, high = max(spec.start, self.start), min(spec.stop, self.stop)
            source = value[low - spec.start : high - spec.start]
            tensors[name][low - self.start : high - self.start] = source
        return tensors
