"""The keys of a table that updates touch most often."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from trireme.compiled import compile_for, compiled
from trireme.tables.keys import SLOTS
from trireme.tables.row_storage import (
    RowStorage,
    read_key,
    read_mark,
    record_address,
    touches_of,
)


class HotKey(NamedTuple):
    """A key that is touched often.

    Attributes:
        key: the key.
        touches: how many updates have touched it; it stays at 16,777,215.
    """

    key: int
    touches: int


class HotKeys:
    """Finds the keys that are touched most often, some slots at a time.

    A look at all records of a large table would keep its server from answering.

    Args:
        most: how many keys are found.
    """

    def __init__(self, most: int = 5) -> None:
        self._most = most
        self._keys = np.zeros((SLOTS, most), np.int64)
        self._touches = np.zeros((SLOTS, most), np.int64)
        self._next = 0

    def look(self, storage: RowStorage, records: int) -> list[HotKey]:
        """Reads the next slots, and returns the most often touched keys of all slots read so far.

        Args:
            storage: the records of the table's rows.
            records: at how many records to look at least, unless there are fewer.
        """
        for _ in range(SLOTS):
            slot, self._next = self._next, (self._next + 1) % SLOTS
            count = int(storage.counts[slot])
            self._touches[slot] = 0
            _hottest(
                slot,
                count,
                storage.blocks,
                storage.shift,
                storage.record_bytes,
                self._keys[slot],
                self._touches[slot],
            )
            records -= count
            if records <= 0:
                break
        keys, touches = self._keys.reshape(-1), self._touches.reshape(-1)
        order = np.lexsort((keys, -touches))[: self._most]
        return [HotKey(int(keys[at]), int(touches[at])) for at in order if touches[at]]


@compiled
def _hottest(
    slot: Any, count: Any, blocks: Any, shift: Any, record_bytes: Any, keys: Any, touches: Any
) -> None:
    """Writes the keys of a slot with the most touches, in descending order; `touches` is zero."""
    last = touches.size - 1
    for row in range(count):
        address = record_address(blocks, slot, np.uint64(row), shift, record_bytes)
        found = touches_of(read_mark(address))
        if found <= touches[last]:
            continue
        place = last
        while place > 0 and touches[place - 1] < found:
            touches[place], keys[place] = touches[place - 1], keys[place - 1]
            place -= 1
        touches[place], keys[place] = found, read_key(address)


def prepare() -> None:
    """Compiles what this module needs, or loads it from the cache."""
    compile_for(_hottest, "(int64, int64, uint64[:, ::1], uint64, uint64, int64[::1], int64[::1])")
