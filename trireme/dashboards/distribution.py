"""The distribution of a tensor's values: a histogram and moments, computed in a few passes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

BINS = 64
"""The number of equally wide ranges of a histogram."""

_PIECE = 1 << 18  # numbers: what is computed of them stays in a cache, and so do sums' digits


@dataclass(frozen=True)
class Distribution:
    """The distribution of a tensor's finite values.

    Attributes:
        mean, deviation: the mean and the standard deviation of the values, which are no estimates.
        infinite: the number of values that are NaN or infinite, and are left out.
        limits: the ranges' upper bounds, ascending; the first range begins at `low`.
        counts: how many values are in each range.
    """

    low: float
    high: float
    mean: float
    deviation: float
    count: int
    infinite: int
    limits: tuple[float, ...]
    counts: tuple[float, ...]

    @property
    def moments(self) -> dict[str, float]:
        """The moments that are shown as curves, by name."""
        return {"mean": self.mean, "std": self.deviation, "min": self.low, "max": self.high}

    @property
    def sum(self) -> float:
        """The sum of the values."""
        return self.mean * self.count

    @property
    def sum_of_squares(self) -> float:
        """The sum of the squares of the values."""
        return (self.deviation**2 + self.mean**2) * self.count


@torch.no_grad()
def distribution_of(values: torch.Tensor, bins: int = BINS) -> Distribution | None:
    """Returns the distribution of values; None if none of them is finite.

    The ranges have equal widths, where TensorBoard usually has 1,500 that grow exponentially:
    PyTorch counts equal ranges on the tensor's device, and TensorBoard draws equal ranges anyway.
    """
    flat = _in_memory_order(values)
    total = flat.numel()
    if not total:
        return None
    low, high = (float(bound) for bound in torch.aminmax(flat))
    if not (math.isfinite(low) and math.isfinite(high)):
        flat = flat[torch.isfinite(flat)]
        if not flat.numel():
            return None
        low, high = (float(bound) for bound in torch.aminmax(flat))
    count = flat.numel()
    pieces = torch.split(flat, _PIECE)
    mean = float(torch.stack([piece.sum() for piece in pieces]).double().sum()) / count
    norms = torch.stack([torch.linalg.vector_norm(piece - mean) for piece in pieces]).double()
    deviation = float(torch.linalg.vector_norm(norms)) / math.sqrt(count)
    limits: tuple[float, ...] = (high,)
    counts: tuple[float, ...] = (float(count),)
    if low < high:
        width = (high - low) / bins
        limits = (*(low + width * place for place in range(1, bins)), high)
        counts = tuple(torch.histc(flat, bins, low, high).tolist())
    return Distribution(low, high, mean, deviation, count, total - count, limits, counts)


def _in_memory_order(values: torch.Tensor) -> torch.Tensor:
    """Returns the values as one dimension, without a copy where they lie without gaps.

    Their order does not matter, and reading memory in its own order is much faster.
    """
    values = values.detach()
    if not values.is_floating_point() or values.dtype in (torch.float16, torch.bfloat16):
        values = values.float()
    if values.is_contiguous():
        return values.view(-1)
    order = sorted(range(values.dim()), key=values.stride, reverse=True)
    return values.permute(order).reshape(-1)
