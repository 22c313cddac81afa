"""Rows gathered from a batch's distinct ones, one by one or as sums of bags, with their gradients.

They compute what `torch.nn.functional.embedding` and `embedding_bag` do, on CPUs. Backward adds
the gradients of a row in the order of the batch, without sorting the batch by row as those do: it
takes a tenth of their time. Gradients of gradients work, but for those of weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trireme.compiled import compile_for, compiled
from trireme.tables.keys import plain, sum_rows


def gather(rows: torch.Tensor, places: torch.Tensor, padding: int | None = None) -> torch.Tensor:
    """Returns the row at each place.

    Args:
        rows: of shape (n, width), float32 or float64.
        places: int64, of any shape.
        padding: a row that gets no gradient.

    Returns:
        A tensor of the shape of `places` with a further dimension of `width`.
    """
    return _Gather.apply(rows, places, padding)  # type: ignore[no-untyped-call, no-any-return]


def sum_bags(
    rows: torch.Tensor,
    places: torch.Tensor,
    bounds: torch.Tensor,
    weights: torch.Tensor | None = None,
    padding: int | None = None,
) -> torch.Tensor:
    """Returns the sum of the rows of each bag.

    Args:
        rows: of shape (n, width), float32 or float64.
        places: the rows of all bags, one bag after the other: int64 of shape (entries,).
        bounds: where each bag begins, and where the last one ends: int64 of shape (bags + 1,). They
            ascend from 0 on.
        weights: a factor for each entry, of shape (entries,) and of the dtype of `rows`. No
            gradients are computed for them.
        padding: a row that gets no gradient.

    Returns:
        A tensor of shape (bags, width).
    """
    weights = rows.new_empty(0) if weights is None else weights.detach()
    return _SumBags.apply(rows, (places, bounds, weights), padding)  # type: ignore[no-untyped-call, no-any-return]


def _without(gradients: torch.Tensor, padding: int | None) -> torch.Tensor:
    """Returns gradients of rows, zero for the padding."""
    if padding is None:
        return gradients
    return gradients.index_fill(0, torch.tensor([padding]), 0.0)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, places: torch.Tensor, padding: int | None
    ) -> torch.Tensor:
        ctx.places, ctx.count, ctx.padding = places, rows.shape[0], padding
        return rows.index_select(0, places.reshape(-1)).reshape(*places.shape, rows.shape[1])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        summed = _Scatter.apply(gradient, ctx.places, ctx.count)  # type: ignore[no-untyped-call]
        return _without(summed, ctx.padding), None, None


class _Scatter(torch.autograd.Function):
    """Adds rows at places: the gradient of `_Gather`, whose own gradient is `_Gather`."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, places: torch.Tensor, count: int) -> torch.Tensor:
        ctx.places = places
        flat = rows.detach().reshape(places.numel(), rows.shape[-1])
        return torch.from_numpy(sum_rows(flat.numpy(), places.reshape(-1).numpy(), count))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gather(gradient, ctx.places), None, None


class _SumBags(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, bags: tuple[torch.Tensor, ...], padding: int | None
    ) -> torch.Tensor:
        ctx.bags, ctx.count, ctx.padding = bags, rows.shape[0], padding
        sums = np.zeros((bags[1].numel() - 1, rows.shape[1]), rows.detach().numpy().dtype)
        places, bounds, weights = (plain(each.numpy()) for each in bags)
        _sum_bags(plain(rows.detach().numpy()), places, bounds, weights, sums)
        return torch.from_numpy(sums)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        spread = _SpreadBags.apply(gradient, ctx.bags, ctx.count)  # type: ignore[no-untyped-call]
        return _without(spread, ctx.padding), None, None


class _SpreadBags(torch.autograd.Function):
    """Adds what belongs to a bag to its rows: the gradient of `_SumBags`, whose own it is again."""

    @staticmethod
    def forward(
        ctx: Any, given: torch.Tensor, bags: tuple[torch.Tensor, ...], count: int
    ) -> torch.Tensor:
        ctx.bags = bags
        sums = np.zeros((count, given.shape[1]), given.detach().numpy().dtype)
        places, bounds, weights = (plain(each.numpy()) for each in bags)
        _spread_bags(plain(given.detach().numpy()), places, bounds, weights, sums)
        return torch.from_numpy(sums)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _SumBags.apply(gradient, ctx.bags, None), None, None  # type: ignore[no-untyped-call]


@compiled
def _sum_bags(rows: Any, places: Any, bounds: Any, weights: Any, sums: Any) -> None:
    """Adds to each bag its rows."""
    for bag in range(bounds.size - 1):
        for entry in range(bounds[bag], bounds[bag + 1]):
            place = places[entry]
            if weights.size:
                for column in range(rows.shape[1]):
                    sums[bag, column] += weights[entry] * rows[place, column]
            else:
                for column in range(rows.shape[1]):
                    sums[bag, column] += rows[place, column]


@compiled
def _spread_bags(gradients: Any, places: Any, bounds: Any, weights: Any, sums: Any) -> None:
    """Adds to each row the gradients of the bags that it is in."""
    for bag in range(bounds.size - 1):
        for entry in range(bounds[bag], bounds[bag + 1]):
            place = places[entry]
            if weights.size:
                for column in range(gradients.shape[1]):
                    sums[place, column] += weights[entry] * gradients[bag, column]
            else:
                for column in range(gradients.shape[1]):
                    sums[place, column] += gradients[bag, column]


def prepare(dtype: str) -> None:
    """Compiles what this module needs for rows of a dtype, or loads it from the cache."""
    matrix = f"{dtype}[:, ::1]"
    for function in (_sum_bags, _spread_bags):
        compile_for(function, f"({matrix}, int64[::1], int64[::1], {dtype}[::1], {matrix})")
