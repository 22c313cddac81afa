"""Splits a data set into training, validation and test sets, reproducibly."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from trireme.data.seeds import derive, permutation

__all__ = ["indices", "split"]


def split(
    dataset: Dataset[Any],
    parts: Sequence[int] | Sequence[float],
    *,
    seed: int = 0,
    labels: torch.Tensor | None = None,
) -> tuple[Dataset[Any], ...]:
    """Shuffles a data set and splits it into parts that do not overlap.

    Args:
        dataset: a map-style data set.
        parts: the number of examples of each part, or, as floats, its fraction of them. Remaining
            examples are left out.
        seed: the seed of the shuffle.
        labels: the class of each example, shape (N,): each part then has the same proportion of
            each class.

    Returns:
        A data set for each part: a `TensorDataset` for a `TensorDataset`, else a `Subset`.

    Raises:
        ValueError: the parts are larger than the data set, or there is not one label for each
            example.
    """
    size = len(dataset)  # type: ignore[arg-type]  # map-style data sets have a length
    chosen = indices(size, parts, seed=seed, labels=labels)
    if isinstance(dataset, TensorDataset):
        return tuple(TensorDataset(*(t[part] for t in dataset.tensors)) for part in chosen)
    return tuple(Subset(dataset, part.tolist()) for part in chosen)


def indices(
    size: int,
    parts: Sequence[int] | Sequence[float],
    *,
    seed: int = 0,
    labels: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Returns which examples `split` puts into each part, as int64 tensors.

    Raises:
        ValueError: as `split`.
    """
    bounds = _bounds(size, parts)
    order = torch.from_numpy(permutation(size, derive(seed)))
    if labels is not None:
        if labels.shape != (size,):
            raise ValueError(
                f"labels have shape {tuple(labels.shape)}: {size} examples need one each"
            )
        order = _evenly_mixed(order, labels)
    return tuple(order[start:stop] for start, stop in pairwise(bounds))


def _bounds(size: int, parts: Sequence[int] | Sequence[float]) -> list[int]:
    ends = list(accumulate(parts, initial=0))
    if any(isinstance(part, float) for part in parts):
        # Rounding the ends, not the parts: fractions that sum to 1 leave no example out.
        ends = [round(end * size) for end in ends]
    if any(part < 0 for part in parts) or ends[-1] > size:
        raise ValueError(f"cannot take the parts {tuple(parts)} from {size} examples")
    return [int(end) for end in ends]


def _evenly_mixed(order: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Reorders so that any range has each class in proportion, to within one example.

    Examples are sorted by their relative position within their class, from 0 to 1. Among equals
    the shuffled order stays.
    """
    shuffled = labels[order].numpy()
    keys = np.empty(len(shuffled))
    for label in np.unique(shuffled):
        mine = shuffled == label
        count = int(mine.sum())
        keys[mine] = (np.arange(count) + 0.5) / count
    return order[torch.from_numpy(np.argsort(keys, kind="stable"))]
