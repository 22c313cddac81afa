"""The orders of a data set's examples: endless sequences of epochs, and their fingerprints.

Every worker computes its order for itself, so it must follow from the seed and the epoch alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

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
    """

    examples: int | None  # that the data set must have; None for any number
    batched = False  # whether each position is a batch of examples

    def __init__(self, size: int, seed: int = 0, shuffle: bool = True) -> None:
        if size < 1:
            raise ValueError(f"an epoch has {size} examples: there must be at least one")
        self.size = self.examples = size
        self.seed = seed
        self.shuffle = shuffle  # else each epoch runs from 0 to size - 1
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
        if not self.shuffle:
            return torch.arange(self.size)
        return torch.from_numpy(permutation(self.size, derive(self.seed, epoch)))


_MOST_PARTS = 100


def fingerprint(order: Order, dataset: object = None) -> int:
    """Returns a number of 1 to 2**56 that other orders of examples do not have, but by chance.

    It covers the order, and the indices of a `Subset` (as of `random_split`) or of a selection of
    Hugging Face's `Dataset`, also inside other data sets. It does not cover the examples
    themselves, as what makes them may be random.
    """
    digest = hashlib.blake2b(digest_size=7)
    for part in (*order.content(), *_selections(dataset, ())):
        data = part.tobytes() if isinstance(part, np.ndarray) else repr(part).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return 1 + int.from_bytes(digest.digest(), "little")


def _selections(dataset: object, outer: tuple[int, ...]) -> Iterator[Any]:
    """Yields what says which examples of other data sets this one consists of."""
    if isinstance(dataset, Subset):
        yield np.asarray(dataset.indices, dtype=np.int64)
    elif isinstance(dataset, ConcatDataset):
        yield tuple(dataset.cumulative_sizes)
    elif (table := getattr(dataset, "_indices", None)) is not None:  # Hugging Face's `Dataset`
        column = getattr(table, "column", None)
        if callable(column):
            yield np.asarray(column(0), dtype=np.int64)
    if not isinstance(dataset, Dataset) or len(outer) >= _MOST_PARTS:
        return
    outer = (*outer, id(dataset))
    for value in vars(dataset).values():
        several = isinstance(value, list | tuple) and len(value) <= _MOST_PARTS
        for part in value if several else (value,):
            known = isinstance(part, Dataset) or "_indices" in getattr(part, "__dict__", ())
            if known and id(part) not in outer:
                yield from _selections(part, outer)
