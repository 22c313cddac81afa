"""The residuals of one worker's packed pushes: what is lost in packing and still to be sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from trireme.ps.compression import Packer
from trireme.ps.layout import Layout, Vector

__all__ = ["Residuals"]


class Residuals:
    """The residuals of a worker's packers by parameter, whatever the number of servers.

    Args:
        layout: the model's layout.
        packers: one for each server.
    """

    def __init__(self, layout: Layout, packers: Sequence[Packer]) -> None:
        self._layout = layout
        self._packers = packers

    def export(self) -> dict[str, torch.Tensor]:
        """Returns copies, by parameter, in the parameters' shapes."""
        named: dict[str, torch.Tensor] = {}
        for vector in self._layout.vectors:
            whole = torch.zeros(vector.length)
            for start, residual in self._of(vector):
                whole[start : start + residual.numel()] = residual
            for placed in vector.placed:
                piece = whole[placed.start : placed.stop].clone()
                named[placed.parameter.name] = piece.view(placed.parameter.shape)
        return named

    def restore(self, named: Mapping[str, torch.Tensor]) -> None:
        """Replaces the residuals; those of parameters that are not named become zero."""
        for vector in self._layout.vectors:
            whole = torch.zeros(vector.length)
            for placed in vector.placed:
                name = placed.parameter.name
                if name in named:
                    whole[placed.start : placed.stop] = named[name].reshape(-1)
            for start, residual in self._of(vector):
                residual.copy_(whole[start : start + residual.numel()])

    def _of(self, vector: Vector) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields each server's part of a vector: where it begins, and its residual."""
        for server, packer in enumerate(self._packers):
            parts = [part for part in self._layout.parts(server) if part.length]
            for part, residual in zip(parts, packer.residuals, strict=True):
                if part.vector is vector:
                    yield part.start, residual
