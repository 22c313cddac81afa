"""Batches of sparse rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch


class SparseBatch(NamedTuple):
    """Rows of (key, value) pairs, one after the other, as a sparse matrix in CSR form has them.

    A session calls the model with offsets, keys and values, and the loss with the labels.
    `torch.nn.EmbeddingBag(..., mode="sum")` takes `(keys, offsets, values)`. Offsets come first,
    because a session counts the examples of a batch by its first tensor. A batch cannot be split
    into pieces by the length of its tensors, so `accumulate` must be 1.

    Attributes:
        offsets: int64 of shape (rows,): where the entries of each row begin; the first is 0.
        keys: int64 of shape (entries,): the features.
        values: float32 of shape (entries,).
        labels: float32 of shape (rows,), as the file has them.
    """

    offsets: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    labels: torch.Tensor

    @property
    def bounds(self) -> torch.Tensor:
        """The offsets and the number of entries: int64 of shape (rows + 1,)."""
        return torch.cat([self.offsets, self.offsets.new_tensor([len(self.keys)])])

    @classmethod
    def join(cls, batches: Sequence[SparseBatch]) -> SparseBatch:
        """Returns one batch of the rows of all; a `collate_fn` for `session.loader`.

        Args:
            batches: at least one.
        """
        if len(batches) == 1:
            return batches[0]
        starts = accumulate((len(each.keys) for each in batches[:-1]), initial=0)
        offsets = [each.offsets + start for each, start in zip(batches, starts, strict=True)]
        _, keys, values, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        return cls(torch.cat(offsets), keys, values, labels)


class ClickBatch(NamedTuple):
    """Rows of Criteo's format: whether an advertisement was clicked, and 39 features.

    A session calls the model with counts and keys, and the loss with the labels.

    Attributes:
        counts: float32 of shape (rows, 13): the integers of the file; NaN for one that is missing.
        keys: int64 of shape (rows, 26): the hashed categories. A missing category is one of its
            own.
        labels: float32 of shape (rows,): 1 for a click, else 0.
    """

    counts: torch.Tensor
    keys: torch.Tensor
    labels: torch.Tensor

    @classmethod
    def join(cls, batches: Sequence[ClickBatch]) -> ClickBatch:
        """Returns one batch of the rows of all; a `collate_fn` for `session.loader`.

        Args:
            batches: at least one.
        """
        if len(batches) == 1:
            return batches[0]
        return cls(*(torch.cat(parts) for parts in zip(*batches, strict=True)))

    def entries(self) -> SparseBatch:
        """Returns the rows as a linear model takes them, 39 entries each.

        An integer on the scale log(1 + x) is the value of one of the keys -13 to -1, from the first
        column to the last; a category is a key with the value 1.
        """
        rows, numbers = self.counts.shape
        columns = torch.arange(-numbers, 0).expand(rows, numbers)
        keys = torch.cat([columns, self.keys], 1)
        values = torch.cat([log_scale(self.counts), torch.ones(self.keys.shape)], 1)
        offsets = torch.arange(rows) * keys.shape[1]
        return SparseBatch(offsets, keys.reshape(-1), values.reshape(-1), self.labels)


def log_scale(counts: torch.Tensor) -> torch.Tensor:
    """Returns integers on the scale log(1 + x).

    A missing or a negative one counts as 0, as in the reference implementation of DLRM (Naumov et
    al., 2019).

    Args:
        counts: those of a `ClickBatch`.

    Returns:
        A tensor of the same shape and dtype.
    """
    return torch.log1p(torch.nan_to_num(counts, nan=0.0).clamp(min=0))
