"""Batches of sparse rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class SparseBatch(NamedTuple):
    """Rows of (key, value) pairs, one after the other, as a sparse matrix in CSR form has them.

    Row i has the entries `offsets[i]` to `offsets[i + 1]` of `keys` and `values`, as
    `torch.nn.functional.embedding_bag` takes them with `include_last_offset=True`.

    Attributes:
        labels: float32 of shape (rows,), as the file has them.
        offsets: int64 of shape (rows + 1,); the first is 0, the last the number of entries.
        keys: int64 of shape (entries,): the features.
        values: float32 of shape (entries,).
    """

    labels: torch.Tensor
    offsets: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def join(cls, batches: Sequence[SparseBatch]) -> SparseBatch:
        """Returns one batch of the rows of all; a `collate_fn` for `session.loader`.

        Args:
            batches: at least one.
        """
        if len(batches) == 1:
            return batches[0]
        starts = [0]
        for each in batches:
            starts.append(starts[-1] + len(each.keys))
        moved = [each.offsets[:-1] + at for each, at in zip(batches, starts, strict=False)]
        offsets = torch.cat([*moved, torch.tensor(starts[-1:])])
        labels, _, keys, values = (torch.cat(parts) for parts in zip(*batches, strict=True))
        return cls(labels, offsets, keys, values)


class ClickBatch(NamedTuple):
    """Rows of Criteo's format: whether an advertisement was clicked, and 39 features.

    Attributes:
        labels: float32 of shape (rows,): 1 for a click, else 0.
        counts: float32 of shape (rows, 13): the integers of the file; NaN for one that is missing.
        keys: int64 of shape (rows, 26): the hashed categories. A missing category is one of its
            own.
    """

    labels: torch.Tensor
    counts: torch.Tensor
    keys: torch.Tensor

    @property
    def dense(self) -> torch.Tensor:
        """The integers on the scale log(1 + x), float32 of shape (rows, 13).

        A missing or a negative one counts as 0, as in the reference implementation of DLRM
        (Naumov et al., 2019).
        """
        return torch.log1p(torch.nan_to_num(self.counts, nan=0.0).clamp_(min=0))

    @classmethod
    def join(cls, batches: Sequence[ClickBatch]) -> ClickBatch:
        """Returns one batch of the rows of all; a `collate_fn` for `session.loader`.

        Args:
            batches: at least one.
        """
        if len(batches) == 1:
            return batches[0]
        return cls(*(torch.cat(parts) for parts in zip(*batches, strict=True)))
