"""Rows gathered from a batch's distinct ones, one by one or as sums of bags, with their gradients.

They compute what `torch.nn.functional.embedding` and `embedding_bag` do, on CPUs. Backward adds
the gradients of a row in the order of the batch, without sorting the batch by row as those do: it
takes a tenth of their time, and less where rows are short.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from trireme.compiled import compile_for, compiled
from trireme.tables.arrays import plain
from trireme.tables.keys import sum_rows


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
    return _SumBags.apply(rows, places, bounds, weights, padding)  # type: ignore[no-untyped-call, no-any-return]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, places: torch.Tensor, padding: int | None
    ) -> torch.Tensor:
        ctx.places, ctx.count, ctx.padding = places.reshape(-1), rows.shape[0], padding
        return rows.index_select(0, ctx.places).reshape(*places.shape, rows.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        flat = gradient.reshape(len(ctx.places), gradient.shape[-1])
        summed = sum_rows(flat.numpy(), ctx.places.numpy(), ctx.count)
        if ctx.padding is not None:
            summed[ctx.padding] = 0
        return torch.from_numpy(summed), None, None


class _SumBags(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        places: torch.Tensor,
        bounds: torch.Tensor,
        weights: torch.Tensor | None,
        padding: int | None,
    ) -> torch.Tensor:
        values = rows.detach().numpy()
        factors = np.empty(0, values.dtype) if weights is None else weights.detach().numpy()
        ctx.count, ctx.padding = len(values), padding
        arrays = plain(places.numpy()), plain(bounds.numpy()), plain(factors)
        ctx.arrays = arrays
        sums = np.zeros((len(bounds) - 1, values.shape[1]), values.dtype)
        _sum_bags(plain(values), *arrays, sums)
        return torch.from_numpy(sums)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        given = plain(gradient.numpy())
        sums = np.zeros((ctx.count, given.shape[1]), given.dtype)
        places, bounds, weights = ctx.arrays
        _spread_bags(given, places, bounds, weights, sums)
        if ctx.padding is not None:
            sums[ctx.padding] = 0
        return torch.from_numpy(sums), None, None, None, None


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
