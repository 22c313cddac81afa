"""The keys of a table that updates touch most often."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trireme.tables.keys import SLOTS
from trireme.tables.row_storage import RowStorage
from trireme.tables.row_values import headers

_MOST = 5


class HotKey(NamedTuple):
    """A key that is touched often."""

    key: int
    touches: int  # how many updates have touched it; it stays at 16,777,215


class HotKeys:
    """Finds the keys that are touched most often, some slots at a time.

    A look at all records of a large table would keep its server from answering.
    """

    def __init__(self) -> None:
        self._found: dict[int, list[HotKey]] = {}
        self._next = 0

    def look(self, storage: RowStorage, records: int) -> list[HotKey]:
        """Reads so many records, and returns the hottest keys of all slots read so far."""
        for _ in range(SLOTS):
            slot, self._next = self._next, (self._next + 1) % SLOTS
            keys, _, touches = headers(storage.addresses(slot))
            hottest = np.argsort(-touches, kind="stable")[:_MOST]
            self._found[slot] = [HotKey(int(keys[at]), int(touches[at])) for at in hottest]
            records -= keys.size
            if records <= 0:
                break
        every = [key for found in self._found.values() for key in found if key.touches]
        return sorted(every, key=lambda each: (-each.touches, each.key))[:_MOST]
