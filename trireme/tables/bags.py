"""Rows gathered from a batch's distinct ones, one by one or as sums of bags, with their gradients.

They compute what `torch.nn.functional.embedding` and `embedding_bag` do, on CPUs. Backward adds
the gradients of a row in the order of the batch, without sorting the batch by row as those do: it
takes a tenth of their time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from trireme.tables.compiled import compiled
from trireme.tables.keys import plain, sum_rows


def gather(rows: torch.Tensor, places: torch.Tensor, padding: int | None = None) -> torch.Tensor:
    """Returns the row (float32 or float64) at each place (int64); `padding` gets no gradient."""
    return _Gather.apply(rows, places, padding)  # type: ignore[no-untyped-call, no-any-return]


def sum_bags(
    rows: torch.Tensor,
    places: torch.Tensor,
    bounds: torch.Tensor,
    weights: torch.Tensor | None = None,
    padding: int | None = None,
) -> torch.Tensor:
    """Returns the sum of the rows (float32 or float64) of each bag, of shape (bags, width).

    `places` (int64) are the rows of all bags, one bag after the other, and `bounds` where each bag
    begins and the last one ends. The `weights`, factors of the entries, and the row `padding` get
    no gradients.
    """
    bags = places, bounds, None if weights is None else weights.detach()
    return _SumBags.apply(rows, bags, padding)  # type: ignore[no-untyped-call, no-any-return]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, places: torch.Tensor, padding: int | None
    ) -> torch.Tensor:
        ctx.places, ctx.count, ctx.padding = places, rows.shape[0], padding
        return rows.index_select(0, places.reshape(-1)).reshape(*places.shape, rows.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        flat = gradient.reshape(ctx.places.numel(), gradient.shape[-1])
        sums = sum_rows(flat.numpy(), ctx.places.reshape(-1).numpy(), ctx.count)
        return _without(sums, ctx.padding), None, None


class _SumBags(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, bags: tuple[Any, ...], padding: int | None
    ) -> torch.Tensor:
        given = rows.detach().numpy()
        ctx.bags, ctx.shape, ctx.padding = bags, given.shape, padding
        sums = np.zeros((bags[1].numel() - 1, given.shape[1]), given.dtype)
        places, bounds, weights = map(_array, bags)
        _sum_bags(plain(given), places, bounds, weights, sums)
        return torch.from_numpy(sums)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        sums = np.zeros(ctx.shape, gradient.numpy().dtype)
        places, bounds, weights = map(_array, ctx.bags)
        _spread_bags(plain(gradient.numpy()), places, bounds, weights, sums)
        return _without(sums, ctx.padding), None, None


def _without(gradients: Any, padding: int | None) -> torch.Tensor:
    if padding is not None:
        gradients[padding] = 0.0
    return torch.from_numpy(gradients)


def _array(tensor: torch.Tensor | None) -> Any:
    return None if tensor is None else plain(tensor.numpy())


@compiled
def _weighted(value: Any, weights: Any, entry: Any) -> Any:
    return value if weights is None else weights[entry] * value  # decided when it is compiled


@compiled
def _sum_bags(rows: Any, places: Any, bounds: Any, weights: Any, sums: Any) -> None:
    for bag in range(bounds.size - 1):
        for entry in range(bounds[bag], bounds[bag + 1]):
            place = places[entry]
            for column in range(rows.shape[1]):
                sums[bag, column] += _weighted(rows[place, column], weights, entry)


@compiled
def _spread_bags(gradients: Any, places: Any, bounds: Any, weights: Any, sums: Any) -> None:
    for bag in range(bounds.size - 1):
        for entry in range(bounds[bag], bounds[bag + 1]):
            place = places[entry]
            for column in range(gradients.shape[1]):
                sums[place, column] += _weighted(gradients[bag, column], weights, entry)
