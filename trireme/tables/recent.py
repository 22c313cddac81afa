"""The last searches of a table: a worker pushes the keys that it has pulled a moment before."""

from __future__ import annotations

from collections import deque

import numpy as np

from trireme.tables.keys import Keys
from trireme.tables.row_index import Addresses

_MOST_KEYS = 1 << 20  # 16 MiB for a batch of so many


class RecentSearches:
    """Remembers where the keys of the last few batches are, as long as no record moves.

    A comparison of two batches costs a fiftieth of a search.

    Args:
        most: how many batches are remembered.
    """

    def __init__(self, most: int = 8) -> None:
        self._kept: deque[tuple[Keys, Addresses]] = deque(maxlen=most)

    def find(self, keys: Keys) -> Addresses | None:
        """Returns the addresses of the records of keys if exactly these were searched for.

        The entry is taken out: a batch is pulled and pushed once.
        """
        if not keys.size:
            return None
        for place, (known, addresses) in enumerate(self._kept):
            if known.size == keys.size and known[-1] == keys[-1] and np.array_equal(known, keys):
                del self._kept[place]
                return addresses
        return None

    def keep(self, keys: Keys, addresses: Addresses) -> None:
        """Remembers a batch all of whose keys have records, unless it is very large."""
        if 0 < keys.size <= _MOST_KEYS:
            self._kept.append((keys.copy(), addresses))

    def clear(self) -> None:
        """Forgets all, because records may have moved."""
        self._kept.clear()
