"""Updates by kernels that are bound to pieces of a shard and to their state.

They spare the bookkeeping of `Optimizer.step`, which takes longer than a kernel does for a small
model, and divide gradients themselves, which spares a pass over memory, where that is as precise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from trireme.kernels.fused import DIRECT, FusedKernel
from trireme.ps.flat import PartBuffer
from trireme.ps.shard.values.direct_steps import Bound, DirectSteps
from trireme.ps.shard.values.piece import Piece

_MOST_CALLS = 64  # bindings of kernels that are kept, one for each set of absent parameters


@dataclass(slots=True, frozen=True, eq=False)
class _Call:
    """A kernel, bound to some pieces of one parameter group."""

    kernel: FusedKernel
    places: list[int]  # the positions of the pieces' segments
    pieces: Sequence[Piece]  # none where they are whole segments


class FusedSteps(DirectSteps):
    """Steps by the kernels of one optimizer."""

    def __init__(self, name: str, *, wide: bool) -> None:
        self._name, self._wide = name, wide
        self._divisor = torch.tensor(1.0)  # the last one
        self._calls: dict[tuple[int, ...], list[_Call]] = {}  # by the absent parameters

    def step(self, gradients: PartBuffer, divisor: float, absent: tuple[int, ...]) -> bool:
        calls = self._calls.get(absent)
        if calls is None:
            return False
        scale = None if divisor == 1.0 else self._scale(divisor)
        if divisor != 1.0 and scale is None:
            for place in dict.fromkeys(place for call in calls for place in call.places):
                gradients.segments[place].div_(divisor)
        at = gradients.segments.__getitem__
        for call in calls:
            if call.pieces:
                parts = [piece.gradient(gradients) for piece in call.pieces]
            else:
                parts = list(map(at, call.places))
            call.kernel.update(parts, scale)
        return True

    def bind(self, absent: tuple[int, ...], found: Sequence[Bound]) -> None:
        if len(self._calls) >= _MOST_CALLS:
            self._calls.clear()
        self._calls[absent] = [
            _Call(
                FusedKernel(self._name, group, [piece.values for piece in pieces], states),
                [piece.place for piece in pieces],
                [] if all(piece.is_whole for piece in pieces) else pieces,
            )
            for group, pieces, states in found
        ]

    def clear(self) -> None:
        self._calls.clear()

    def refresh(self) -> None:
        kernels = [call.kernel for call in chain.from_iterable(self._calls.values())]
        if not all([kernel.refresh() for kernel in kernels]):
            self._calls.clear()

    def _scale(self, divisor: float) -> torch.Tensor | None:
        """Returns a divisor for the kernels, which take a float32; None where that is not precise.

        For narrow dtypes the kernels round the quotient later than `div_` does.
        """
        if self._divisor.item() != divisor:
            self._divisor = torch.tensor(divisor, dtype=torch.float32)
        return self._divisor if self._wide and self._divisor.item() == divisor else None


def open_steps(name: str, *, wide: bool) -> DirectSteps:
    """Returns the steps of an optimizer; those of the base class make none."""
    return FusedSteps(name, wide=wide) if name in DIRECT else DirectSteps()
