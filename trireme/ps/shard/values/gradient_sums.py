"""Sums and means of the gradients of several updates."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from trireme.ps.flat import PartBuffer


class Total(msgspec.Struct, frozen=True):
    """A weighted sum of gradients, and the divisor for their mean."""

    # the sum, in memory that may be written to; where `divisor` is 1 it may be a gradient itself,
    # to which nobody writes
    gradients: PartBuffer
    divisor: float = 1.0  # the sum of the weights
    # the positions of the parameters that none of the gradients has; see `Push`
    absent: tuple[int, ...] = ()

    def mean(self) -> PartBuffer:
        """Divides the sum in place; returns it."""
        if self.divisor != 1.0:
            for vector in self.gradients.vectors:
                vector.div_(self.divisor)
        return self.gradients


def total_of(
    weights: Sequence[float],
    gradients: Sequence[PartBuffer],
    out: PartBuffer,
    absent: tuple[int, ...] = (),
) -> Total:
    """Returns the weighted sum of gradients, added in the given order.

    Equal weights are added as they are and divided by their number, so that integers stay exact. A
    single gradient is returned itself, without a copy; else the sum is written to `out`.

    Args:
        absent: the parameters of which none of them has a gradient.
    """
    if len(gradients) == 1:
        return Total(gradients[0], absent=absent)
    equal = len(set(weights)) == 1
    factors = [1.0] * len(weights) if equal else weights
    for position, target in enumerate(out.vectors):
        first, second, *others = [each.vectors[position] for each in gradients]
        if factors[0] == 1.0:  # one pass over the first two
            torch.add(first, second, alpha=factors[1], out=target)
        else:
            torch.mul(first, factors[0], out=target)
            target.add_(second, alpha=factors[1])
        for vector, factor in zip(others, factors[2:], strict=True):
            target.add_(vector, alpha=factor)
    return Total(out, float(len(weights)) if equal else sum(weights), absent)


def squared_norm(buffer: PartBuffer) -> float:
    """Returns the sum of the squares of all elements, in float64."""
    total = 0.0
    for vector in buffer.vectors:
        if vector.numel():
            total += float(torch.linalg.vector_norm(vector, dtype=torch.float64)) ** 2
    return total
