"""The order of a data set's examples: an endless sequence of shuffled epochs."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from trireme.data.seeds import derive, permutation

SAME_ORDER = (
    "indices, a random_split, weights or a sampler were drawn anew in each process. Draw them from "
    "a seed that all share, such as random_split(..., generator=torch.Generator().manual_seed(0))"
)
"""What explains that workers have different orders, and what to do."""


class Order:
    """Maps positions to examples.

    Positions count 0, 1, 2, ... without end. Position p belongs to epoch p // size, and each epoch
    holds every example once, in an order of its own. So every batch, a range of positions, is
    full; one that crosses the end of an epoch takes the rest from the next.

    The order follows from (size, seed) alone: every worker computes it for itself, and a position
    means the same example in a job that is resumed.

    Attributes:
        size: the number of examples in the data set.
        seed: the seed of the shuffles.
        shuffle: whether epochs are shuffled; otherwise each runs from 0 to size - 1.
        examples: the number of examples that the data set must have; None for any.
    """

    examples: int | None

    def __init__(self, size: int, seed: int = 0, shuffle: bool = True) -> None:
        """Makes an order for `size` examples."""
        if size < 1:
            raise ValueError(f"an epoch has {size} examples: there must be at least one")
        self.size = self.examples = size
        self.seed = seed
        self.shuffle = shuffle
        # The last two are kept: a batch may cross their border, and spans that a lost worker gave
        # back may belong to the epoch before.
        self._epoch = lru_cache(maxsize=2)(self._build)

    def indices(self, start: int, stop: int) -> torch.Tensor:
        """Returns the examples at positions start to stop - 1: int64, shape (stop - start,).

        The tensor may be a view of one that is kept: read it, do not write to it.
        """
        if not 0 <= start < stop:
            raise ValueError(f"[{start}, {stop}) is not a range of positions")
        pieces = []
        while start < stop:
            epoch, first = divmod(start, self.size)
            pieces.append(self._epoch(epoch)[first : first + stop - start])
            start += len(pieces[-1])
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]

    def content(self) -> tuple[Any, ...]:
        """Returns what the order follows from: plain values, and arrays of NumPy."""
        return type(self).__name__, self.size, self.seed, self.shuffle

    def _build(self, epoch: int) -> torch.Tensor:
        """Returns the examples of an epoch in their order."""
        if not self.shuffle:
            return torch.arange(self.size)
        return torch.from_numpy(permutation(self.size, derive(self.seed, epoch)))
