"""Sums and means of the gradients of several updates."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from trireme.ps.flat import PartBuffer

__all__ = ["Contribution", "Total", "mean_of", "squared_norm", "total_of"]


class Contribution(msgspec.Struct, frozen=True):
    """What one update brings to a mean.

    Attributes:
        weight: how much it counts; above zero.
        gradients: the gradient.
    """

    weight: float
    gradients: PartBuffer


class Total(msgspec.Struct, frozen=True):
    """A weighted sum of gradients, and what to divide it by for their mean.

    Attributes:
        gradients: the sum, in memory that may be written to; where `divisor` is 1 it may be a
            gradient itself, to which nobody writes.
        divisor: the sum of the weights.
        absent: the positions of the parameters that none of the gradients has; see `Push`.
    """

    gradients: PartBuffer
    divisor: float = 1.0
    absent: tuple[int, ...] = ()


def mean_of(contributions: Sequence[Contribution], out: PartBuffer) -> PartBuffer:
    """Returns the weighted mean of gradients, added in the given order.

    Equal weights are added as they are and divided once, so that integers stay exact. A single
    gradient is returned itself, without a copy; else the mean is written to `out`.

    Args:
        contributions: at least one.
        out: where the mean goes.
    """
    total = total_of(contributions, out)
    if total.divisor != 1.0:
        for target in total.gradients.vectors:
            target.div_(total.divisor)
    return total.gradients


def total_of(
    contributions: Sequence[Contribution], out: PartBuffer, absent: tuple[int, ...] = ()
) -> Total:
    """Returns what `mean_of` returns, but not divided yet: an optimizer can do that on its way.

    Args:
        contributions: as for `mean_of`.
        out: where the sum goes.
        absent: the parameters of which none of them has a gradient.
    """
    if len(contributions) == 1:
        return Total(contributions[0].gradients, absent=absent)
    weights = [each.weight for each in contributions]
    equal = len(set(weights)) == 1
    factors = [1.0] * len(weights) if equal else weights
    for position, target in enumerate(out.vectors):
        first, second, *others = [each.gradients.vectors[position] for each in contributions]
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
