"""The distribution of a tensor's values: a histogram and moments, computed in a few passes."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

BINS = 64
"""The number of equally wide ranges of a histogram."""

_PIECE = 1 << 18  # numbers: what is computed of them stays in a cache, and so do sums' digits


class Distribution(NamedTuple):
    """The distribution of a tensor's finite values; the standard deviation is no estimate."""

    low: float
    high: float
    mean: float
    deviation: float
    total: int
    infinite: int  # values that are NaN or infinite, and are left out
    counts: tuple[float, ...]  # of the values in each of equally wide ranges from `low` to `high`


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
    counts = (float(count),)
    if low < high:
        counts = tuple(torch.histc(flat, bins, low, high).tolist())
    return Distribution(low, high, mean, deviation, count, total - count, counts)


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
