"""The orders of a data set's examples: endless sequences of epochs, and their fingerprints.

Every worker computes its order for itself, so it must follow from the seed and the epoch alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from trireme.data.draws import drawing
from trireme.data.seeds import derive, permutation, uniform
from trireme.errors import ConfigurationError

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

    Attributes:
        size: the number of examples in the data set.
        seed: the seed of the shuffles.
        shuffle: whether epochs are shuffled; otherwise each runs from 0 to size - 1.
        examples: the number of examples that the data set must have; None for any.
    """

    examples: int | None

    def __init__(self, size: int, seed: int = 0, shuffle: bool = True) -> None:
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
        if not self.shuffle:
            return torch.arange(self.size)
        return torch.from_numpy(permutation(self.size, derive(self.seed, epoch)))


class WeightedOrder(Order):
    """Draws the examples of each epoch by weights, as `torch.utils.data.WeightedRandomSampler`.

    Draw k of an epoch follows from the seed, the epoch and k, by inversion of the cumulative
    weights. Without replacement, the examples with the smallest values of -log(u) / weight are
    taken, in that order (Efraimidis and Spirakis: Weighted random sampling with a reservoir,
    Information Processing Letters 97, 2006).
    """

    def __init__(
        self,
        weights: Sequence[float] | torch.Tensor,
        draws: int | None = None,
        seed: int = 0,
        *,
        replacement: bool = True,
    ) -> None:
        values = torch.as_tensor(weights, dtype=torch.float64).cpu().flatten().numpy()
        count = len(values) if draws is None else draws
        possible = int((values > 0).sum())
        if not np.isfinite(values).all() or (values < 0).any() or not possible:
            raise ConfigurationError(
                "weights must be finite numbers of 0 or more, one for each example, and not all 0"
            )
        if count < 1 or (not replacement and count > possible):
            raise ConfigurationError(
                f"cannot draw {count} of {possible} examples with a weight above 0"
                f"{'' if replacement else ' without replacement'}"
            )
        super().__init__(count, seed)
        self.examples = len(values)
        self._weights, self._replacement = values, replacement
        self._cumulative = np.cumsum(values)

    def content(self) -> tuple[Any, ...]:
        return *super().content(), self._replacement, self._weights

    def _build(self, epoch: int) -> torch.Tensor:
        seed = derive(self.seed, epoch)
        if self._replacement:
            points = uniform(self.size, seed) * self._cumulative[-1]
            drawn = np.searchsorted(self._cumulative, points, side="right")
            # Rounding may put a point at the very end; the last example with a weight is there.
            drawn = np.minimum(drawn, int(np.flatnonzero(self._weights)[-1]))
        else:
            keys = -np.log1p(-uniform(self.examples or 0, seed))
            with np.errstate(divide="ignore"):
                keys = np.where(self._weights > 0, keys / self._weights, np.inf)
            drawn = np.argsort(keys, kind="stable")[: self.size]
        return torch.from_numpy(drawn.astype(np.int64, copy=False))


class SubsetOrder(Order):
    """Shuffled epochs of some examples, as `torch.utils.data.SubsetRandomSampler`."""

    def __init__(self, indices: Sequence[int], seed: int = 0) -> None:
        super().__init__(len(indices), seed)
        self.examples = None
        self._indices = torch.as_tensor(indices, dtype=torch.int64)

    def content(self) -> tuple[Any, ...]:
        return *super().content(), self._indices.numpy()

    def _build(self, epoch: int) -> torch.Tensor:
        return self._indices.index_select(0, super()._build(epoch))


class SamplerOrder(Order):
    """The order of a sampler, which is iterated over once for each epoch.

    The random numbers of torch, NumPy and Python, and the sampler's `generator`, are seeded for it
    from the seed and the epoch; the program's own go on afterwards as if nothing had been drawn.
    A sampler with `set_epoch` is told the epoch.
    """

    def __init__(self, sampler: Iterable[Any], seed: int = 0) -> None:
        size = _length_of(sampler)
        super().__init__(size, seed)
        self.examples = None
        self._sampler, self._checked = sampler, False

    def content(self) -> tuple[Any, ...]:
        """Returns what the order follows from, as far as can be seen: its first epoch."""
        return "sampler", self.size, self._epoch(0).numpy()

    def _build(self, epoch: int) -> torch.Tensor:
        return torch.as_tensor(self._items(epoch), dtype=torch.int64)

    def _items(self, epoch: int) -> list[Any]:
        items = self._iterate(epoch)
        kind = type(self._sampler).__name__
        if len(items) != self.size:
            raise ConfigurationError(
                f"the sampler {kind} says that it has {self.size} entries, and yields "
                f"{len(items)}: it cannot be dealt exactly"
            )
        if not self._checked:
            self._checked = True
            if self._iterate(epoch) != items:
                raise ConfigurationError(
                    f"the sampler {kind} yields another order each time, although the random "
                    "numbers of torch, NumPy and Python are seeded: workers could not agree on "
                    "an order. Draw from one of these, or take `generator`"
                )
        return items

    def _iterate(self, epoch: int) -> list[Any]:
        seed = derive(self.seed, epoch)
        set_epoch = getattr(self._sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        holders = (self._sampler, getattr(self._sampler, "sampler", None))
        own = [getattr(holder, "generator", None) for holder in holders]
        for generator in own:
            if isinstance(generator, torch.Generator):
                generator.manual_seed(seed)
        with drawing() as draw:
            draw(seed)
            return [
                [int(one) for one in item] if isinstance(item, list | tuple) else int(item)
                for item in self._sampler
            ]


class BatchSamplerOrder(SamplerOrder):
    """The order of a batch sampler: each position is one of its batches."""

    def __init__(self, sampler: Iterable[Any], seed: int = 0) -> None:
        super().__init__(sampler, seed)
        self._batches: dict[int, list[list[int]]] = {}

    def content(self) -> tuple[Any, ...]:
        """Returns what the order follows from, as far as can be seen: its first epoch."""
        return "batches", self._of(0)

    def indices(self, start: int, stop: int) -> torch.Tensor:
        """Returns the examples of the batches at positions start to stop - 1."""
        found: list[int] = []
        for position in range(start, stop):
            epoch, number = divmod(position, self.size)
            found += self._of(epoch)[number]
        return torch.as_tensor(found, dtype=torch.int64)

    def _of(self, epoch: int) -> list[list[int]]:
        if epoch not in self._batches:
            if len(self._batches) > 1:
                self._batches.pop(min(self._batches))
            self._batches[epoch] = self._items(epoch)
        return self._batches[epoch]


def _length_of(sampler: object) -> int:
    kind = type(sampler).__name__
    size = None
    if isinstance(sampler, Sized) and isinstance(sampler, Iterable):
        with suppress(TypeError, NotImplementedError):
            size = len(sampler)
    if size is None or isinstance(sampler, Iterator):
        raise ConfigurationError(
            f"the sampler {kind} has no length, or can be iterated over only once: examples are "
            "dealt by their place in an epoch, so give a sampler with __len__ and __iter__"
        )
    if size < 1:
        raise ConfigurationError(f"the sampler {kind} has no entries")
    return size


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
