"""Rows of sparse binary features whose labels follow from planted weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self, final

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import IterableDataset

from sparse_data.ranking import area_under_curve
from trireme.data.seeds import derive
from trireme.errors import ConfigurationError

from .batches import SparseBatch
from .writing import libsvm_rows

_SCATTER = 0x9E3779B97F4A7C15  # odd, so that ranks and keys correspond one to one


@final
class PlantedRegression:
    """A logistic regression on 2^bits features, from which rows are drawn.

    Features have ranks. The rank of an entry is log-uniform, so that a feature of rank r comes in
    about entries / (r log 2^bits) rows: a few features come often, and most never. The `active`
    ones of the lowest ranks have weights, all others 0. So the weights can be learnt from a number
    of rows that depends on `active`, not on the number of features: with the defaults, the AUC of
    FTRL-proximal (alpha 0.1, l1 4) is within 0.002 of the best after two million rows.

    Attributes:
        bits: the logarithm of the number of features, to the base 2.
        weights: the planted weights by rank, float64 of shape (active,).
    """

    def __init__(
        self,
        *,
        bits: int = 26,
        entries: int = 20,
        active: int = 2048,
        scale: float = 0.6,
        seed: int = 0,
    ) -> None:
        """Draws the weights.

        Args:
            bits: the logarithm of the number of features, from 1 to 40.
            entries: the entries of a row; fewer where one is drawn twice.
            active: the number of features that have weights.
            scale: the standard deviation of the weights.
            seed: the same one gives the same weights and rows on one machine, with one NumPy.

        Raises:
            ConfigurationError: a number is out of range.
        """
        if not 1 <= bits <= 40 or entries < 1 or not 1 <= active < 1 << bits:
            raise ConfigurationError(
                f"bits={bits}, entries={entries}, active={active}: there are 1 to 40 bits, at "
                "least one entry, and fewer active features than all"
            )
        self.bits, self._entries, self._seed = bits, entries, seed
        generator = np.random.Generator(np.random.Philox(key=derive(seed, 0)))
        self.weights = generator.normal(0.0, scale, active)

    def rows(self, count: int, batch_size: int = 1000, *, part: int = 0) -> PlantedRows:
        """Returns a stream of rows, the same each time it is read.

        Args:
            count: the number of rows.
            batch_size: the rows of a batch; other batch sizes give other rows.
            part: rows of other parts are others: one to train on, one to be held out.
        """
        return PlantedRows(self, count, batch_size, part)

    def logits(self, batch: SparseBatch) -> npt.NDArray[np.float64]:
        """Returns the logit of the planted probability of a label 1, float64 of shape (rows,)."""
        ranks = self._ranks(batch.keys.numpy())
        known = ranks < len(self.weights)
        weights = np.where(known, self.weights[np.where(known, ranks, 0)], 0.0)
        rows = np.repeat(np.arange(len(batch.labels)), np.diff(batch.bounds.numpy()))
        entries = weights * batch.values.numpy()
        logits: npt.NDArray[np.float64] = np.bincount(
            rows, entries, minlength=len(batch.labels)
        ).astype(np.float64)
        return logits

    def best_auc(self, rows: PlantedRows) -> float:
        """Returns the AUC of the planted probabilities: none is better on these rows but by chance.

        Args:
            rows: are held in memory at once.
        """
        batches = list(rows)
        labels = torch.cat([batch.labels for batch in batches]).numpy()
        return area_under_curve(labels, np.concatenate([self.logits(each) for each in batches]))

    def write(self, path: str | Path, rows: PlantedRows) -> None:
        """Writes rows to a file, in the format of libsvm: `label key:1 key:1 ...`."""
        with Path(path).open("wb") as file:
            for batch in rows:
                bounds, keys = batch.bounds.numpy(), batch.keys.numpy()
                text = np.empty(2 * len(batch.labels) + 16 * len(keys), np.uint8)
                length = libsvm_rows(batch.labels.numpy(), bounds, keys, text)
                file.write(text[:length].data)

    def draw(self, count: int, part: int, number: int) -> SparseBatch:
        """Draws the batch of a number.

        Args:
            count: the number of rows.
            part: the part of the rows.
            number: the batch's number.
        """
        key = derive(self._seed, 1 + part, number)
        generator = np.random.Generator(np.random.Philox(key=key))
        uniform = generator.random((count, self._entries))
        ranks = np.exp2(self.bits * uniform).astype(np.int64) - 1
        keys = np.sort(self._keys(ranks), axis=1)
        first = np.ones(keys.shape, bool)
        first[:, 1:] = keys[:, 1:] != keys[:, :-1]
        offsets = np.concatenate([[0], np.cumsum(first.sum(axis=1))[:-1]]).astype(np.int64)
        chosen = torch.from_numpy(keys[first])
        made = SparseBatch(
            torch.from_numpy(offsets), chosen, torch.ones(len(chosen)), torch.zeros(count)
        )
        chances = 1.0 / (1.0 + np.exp(-self.logits(made)))
        clicked = generator.random(count) < chances
        return made._replace(labels=torch.from_numpy(clicked.astype(np.float32)))

    def _keys(self, ranks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        mask = (1 << self.bits) - 1
        return (ranks * (_SCATTER & mask)) & mask

    def _ranks(self, keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        mask = (1 << self.bits) - 1
        return (keys * pow(_SCATTER, -1, 1 << self.bits)) & mask


@final
class PlantedRows(IterableDataset[SparseBatch]):
    """A stream of the batches of planted rows; made by `PlantedRegression.rows`.

    Attributes:
        num_shards: the number of shards that `session.loader` deals.
    """

    def __init__(self, planted: PlantedRegression, count: int, batch_size: int, part: int) -> None:
        if count < 1 or batch_size < 1:
            raise ConfigurationError(f"count={count}, batch_size={batch_size}: both start at 1")
        self._planted, self._count, self._size, self._part = planted, count, batch_size, part
        self._batches = range(-(-count // batch_size))
        self.num_shards = min(16, len(self._batches))

    def shard(self, num_shards: int, index: int) -> Self:
        """Returns the rows of one part of the batches: every `num_shards`-th."""
        part = object.__new__(type(self))
        part.__dict__.update(vars(self), num_shards=1)
        part._batches = self._batches[index::num_shards]
        return part

    def __iter__(self) -> PlantedIterator:
        return PlantedIterator(self, self._batches)

    def batch(self, number: int) -> SparseBatch:
        """Returns the batch of a number."""
        count = min(self._size, self._count - number * self._size)
        return self._planted.draw(count, self._part, number)


@final
class PlantedIterator(Iterator[SparseBatch]):
    """Draws batch after batch."""

    def __init__(self, rows: PlantedRows, batches: range) -> None:
        self._rows, self._batches, self._next = rows, batches, 0

    def __next__(self) -> SparseBatch:
        if self._next >= len(self._batches):
            raise StopIteration
        self._next += 1
        return self._rows.batch(self._batches[self._next - 1])

    def state_dict(self) -> dict[str, Any]:
        """Returns how many batches were drawn."""
        return {"drawn": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on after so many batches."""
        self._next = int(state["drawn"])
