"""Counts how often keys come up, and keeps the most frequent ones."""

from __future__ import annotations

from typing import Any

import numpy as np

_KEPT = 1 << 16
_PENDING = 1 << 18


class KeyCounts:
    """Counts of the keys that come up most often.

    Of the keys that are rare so far only some are kept: a key that is frequent from the beginning
    is counted exactly, one that becomes frequent later perhaps too low.

    Args:
        kept: how many keys are kept.
        pending: how many keys are gathered before they are counted.
    """

    def __init__(self, kept: int = _KEPT, pending: int = _PENDING) -> None:
        self._kept = kept
        self._most_pending = pending
        self._keys = np.empty(0, np.int64)
        self._counts = np.empty(0, np.int64)
        self._pending: list[Any] = []
        self._gathered = 0

    def add(self, keys: Any) -> None:
        """Counts each of some keys once; int64 of shape (n,)."""
        self._pending.append(keys.copy())
        self._gathered += keys.size
        if self._gathered >= self._most_pending:
            self._count()

    def frequent(self, most: int) -> Any:
        """Returns the most frequent keys, int64: the most frequent one first, then smaller ones."""
        self._count()
        return self._keys[:most].copy()

    def _count(self) -> None:
        new = np.concatenate([np.empty(0, np.int64), *self._pending])
        weights = np.concatenate([self._counts, np.ones(new.size, np.int64)])
        keys, places = np.unique(np.concatenate([self._keys, new]), return_inverse=True)
        counts = np.zeros(keys.size, np.int64)
        np.add.at(counts, places, weights)
        order = np.lexsort((keys, -counts))[: self._kept]
        self._keys, self._counts = keys[order], counts[order]
        self._pending, self._gathered = [], 0
