"""Memory for rows: records in blocks, so that nothing is copied when a large table grows.

A record holds all that a table knows of a key, side by side, so that an update touches as few cache
lines as can be:

    bytes           content
    8               the key
    8               the step of its last update (upper 40 bits), its touches (lower 24 bits)
    width * item    the row
    state * item    the optimizer's state

The records of a slot are numbered from 0 without gaps. They lie in blocks, and blocks are cut from
larger pieces of memory, which all slots share. A removed record is replaced by the last one of its
slot; a block that becomes empty is used again. A small table has small blocks: when it has grown to
1 MiB, and to 32 MiB, its records are copied to larger ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from ctypes import memmove
from typing import Any

import numpy as np
import numpy.typing as npt

from trireme.compiled import compile_for, compiled
from trireme.tables.addresses import array_at
from trireme.tables.keys import SLOTS

HEADER_BYTES = 16
"""The bytes of a record before its row."""

_LINE = 64

# The bytes of a block, unless a record is larger, by the bytes of all records. A slot wastes half a
# block on average. Large tables have large blocks, whose addresses stay in the cache.
_BLOCKS = (1 << 11, 1 << 14, 1 << 17)
_LIMITS = (1 << 20, 1 << 25)

# Pieces of at least 4 MiB get huge pages from numpy, and with them faster access, but memory in
# units of 2 MiB: small tables have small pieces.
_PIECES, _LARGE_PIECE, _LARGE_FROM = (1 << 15, 1 << 20, 1 << 21), 1 << 25, 1 << 26

_S24, _S32 = np.uint64(24), np.uint64(32)
_ONE = np.uint64(1)
_TOUCHES = np.uint64((1 << 24) - 1)


@compiled
def record_address(blocks: Any, slot: Any, row: Any, shift: Any, record_bytes: Any) -> Any:
    """Returns the address (uint64) of a record.

    Args:
        blocks: the addresses of the blocks of each slot, uint64 of shape (slots, blocks).
        slot: the slot.
        row: the number of the record within the slot, uint64.
        shift: a block holds 2**shift records; uint64.
        record_bytes: the bytes of a record, uint64.
    """
    return blocks[slot, row >> shift] + (row & ((_ONE << shift) - _ONE)) * record_bytes


@compiled
def read_key(address: Any) -> Any:
    """Returns the key of the record at an address."""
    words = array_at(address, 2, np.uint32)  # a record begins at a multiple of 4, not always of 8
    return np.int64(np.uint64(words[0]) | (np.uint64(words[1]) << _S32))


@compiled
def read_mark(address: Any) -> Any:
    """Returns the mark of the record at an address: last step and touches in one uint64."""
    words = array_at(address, 4, np.uint32)
    return np.uint64(words[2]) | (np.uint64(words[3]) << _S32)


@compiled
def write_mark(address: Any, mark: Any) -> None:
    """Writes the mark of the record at an address."""
    words = array_at(address, 4, np.uint32)
    words[2] = np.uint32(mark)
    words[3] = np.uint32(mark >> _S32)


@compiled
def write_key(address: Any, key: Any) -> None:
    """Writes the key of the record at an address."""
    words = array_at(address, 2, np.uint32)
    words[0] = np.uint32(np.uint64(key))
    words[1] = np.uint32(np.uint64(key) >> _S32)


@compiled
def mark_of(step: Any, touches: Any) -> Any:
    """Returns a mark: a step below 2**40 and a number of touches, which stays at 2**24 - 1."""
    return (np.uint64(step) << _S24) | min(np.uint64(touches), _TOUCHES)


@compiled
def step_of(mark: Any) -> Any:
    """Returns the step of a mark, as int64."""
    return np.int64(mark >> _S24)


@compiled
def touches_of(mark: Any) -> Any:
    """Returns the touches of a mark, as int64."""
    return np.int64(mark & _TOUCHES)


@compiled
def touch(address: Any, step: Any) -> None:
    """Counts a touch of the record at an address, and keeps the step (uint64) as its last one."""
    touches = (read_mark(address) & _TOUCHES) + _ONE
    write_mark(address, mark_of(step, touches))


@compiled
def copy_record(source: Any, target: Any, record_bytes: Any) -> None:
    """Copies a record from one address to another."""
    words = np.int64(record_bytes) // 4
    old, new = array_at(source, words, np.uint32), array_at(target, words, np.uint32)
    for word in range(words):
        new[word] = old[word]


@compiled
def _drop(
    slot: Any, count: Any, oldest: Any, blocks: Any, shift: Any, record_bytes: Any, dropped: Any
) -> Any:
    kept = 0
    for row in range(count):
        address = record_address(blocks, slot, np.uint64(row), shift, record_bytes)
        if step_of(read_mark(address)) < oldest:
            dropped[row - kept] = read_key(address)
        else:
            if kept != row:
                target = record_address(blocks, slot, np.uint64(kept), shift, record_bytes)
                copy_record(address, target, record_bytes)
            kept += 1
    return kept


@compiled
def _changed_after(addresses: Any, step: Any, chosen: Any) -> Any:
    count = 0
    for each in range(addresses.size):
        if step_of(read_mark(addresses[each])) > step:
            chosen[count] = addresses[each]
            count += 1
    return count


class RowStorage:
    """The records of a table's keys, by slot and number.

    Args:
        payload_bytes: the bytes of a record after its header, a multiple of 4.

    Attributes:
        record_bytes: the bytes of a record, uint64.
        shift: a block holds 2**shift records; uint64.
        blocks: the addresses of the blocks of each slot, uint64 of shape (slots, most blocks).
        counts: the number of records of each slot, int64 of shape (slots,).
        moves: how often all records have moved; addresses that were found before are not valid.
    """

    def __init__(self, payload_bytes: int) -> None:
        self.record_bytes = np.uint64(HEADER_BYTES + payload_bytes)
        self.counts = np.zeros(SLOTS, np.int64)
        self.moves = 0
        self._begin(0)

    def _begin(self, level: int) -> None:
        """Begins without blocks; those to come are of a size of `_BLOCKS`."""
        self._level = level
        self.shift = np.uint64(max(0, (_BLOCKS[level] // int(self.record_bytes)).bit_length() - 1))
        self.blocks = np.zeros((SLOTS, 1), np.uint64)
        self._block_counts = np.zeros(SLOTS, np.int64)
        self._pieces: list[npt.NDArray[np.uint8]] = []
        self._free: list[int] = []
        self._bytes = 0

    @property
    def bytes(self) -> int:
        """The bytes that are allocated; the system lends what was never written to others."""
        return self._bytes + self.blocks.nbytes

    def enlarge(self, records: int) -> None:
        """Copies all records to larger blocks if so many in all are too many for the present ones.

        Raises:
            MemoryError: the system has no memory for them; nothing has changed.
        """
        level = sum(records * int(self.record_bytes) > limit for limit in _LIMITS)
        if level <= self._level:
            return
        larger = RowStorage(int(self.record_bytes) - HEADER_BYTES)
        larger._begin(level)
        size, each = int(self.record_bytes), 1 << int(self.shift)
        mask = (1 << int(larger.shift)) - 1
        for slot in np.flatnonzero(self.counts).tolist():
            count = int(self.counts[slot])
            larger.reserve(slot, count)
            for first in range(0, count, each):
                source = int(self.blocks[slot, first >> int(self.shift)])
                target = int(larger.blocks[slot, first >> int(larger.shift)])
                target += (first & mask) * size
                memmove(target, source, min(each, count - first) * size)
        larger.counts, larger.moves = self.counts, self.moves + 1
        vars(self).update(vars(larger))

    def lacking(self, more: npt.NDArray[np.int64]) -> list[int]:
        """Returns the slots that have no room for so many more records; int64, shape (slots,)."""
        room = self._block_counts << np.int64(self.shift)
        return [int(slot) for slot in np.flatnonzero(self.counts + more > room)]

    def reserve(self, slot: int, records: int) -> None:
        """Makes room for a number of records in a slot, those included that it has.

        Raises:
            MemoryError: the system has no memory for them; nothing has changed.
        """
        needed = -(-records >> int(self.shift))
        while self._block_counts[slot] < needed:
            if not self._free:
                self._allocate()
            if self._block_counts[slot] == self.blocks.shape[1]:
                self.blocks = np.hstack([self.blocks, np.zeros_like(self.blocks)])
            self.blocks[slot, self._block_counts[slot]] = self._free.pop()
            self._block_counts[slot] += 1

    def trim(self) -> None:
        """Lets all slots use the blocks that hold no record any more."""
        needed = -(-self.counts >> np.int64(self.shift))
        for slot in np.flatnonzero(self._block_counts > needed):
            spare = self.blocks[slot, needed[slot] : self._block_counts[slot]]
            self._free += spare.tolist()
            self._block_counts[slot] = needed[slot]

    def drop(self, slot: int, oldest: int) -> npt.NDArray[np.int64]:
        """Removes the records of a slot whose last step is below `oldest`; returns their keys.

        The others keep their order and get new numbers.
        """
        count = int(self.counts[slot])
        dropped = np.empty(count, np.int64)
        kept = _drop(slot, count, oldest, self.blocks, self.shift, self.record_bytes, dropped)
        self.counts[slot] = kept
        self.trim()
        return dropped[: count - kept].copy()

    def clear(self, slot: int) -> None:
        """Removes all records of a slot."""
        self.counts[slot] = 0
        self.trim()

    def addresses(self, slot: int) -> npt.NDArray[np.uint64]:
        """Returns the addresses of all records of a slot, uint64 of shape (records,)."""
        rows = np.arange(self.counts[slot], dtype=np.uint64)
        mask = np.uint64((1 << int(self.shift)) - 1)
        starts = self.blocks[slot, rows >> self.shift]
        addresses: npt.NDArray[np.uint64] = starts + (rows & mask) * self.record_bytes
        return addresses

    def changed(
        self, after: int, slots: Iterable[int], most: int
    ) -> Iterator[npt.NDArray[np.uint64]]:
        """Yields the addresses of the records of some slots whose last step is above `after`.

        Args:
            after: the step; -1 for all records.
            slots: the slots, in the order in which their records come.
            most: the most addresses at a time.
        """
        ready = np.empty(0, np.uint64)
        for slot in slots:
            if not self.counts[slot]:
                continue
            addresses = self.addresses(slot)
            chosen = np.empty_like(addresses)
            count = _changed_after(addresses, after, chosen)
            ready = np.concatenate([ready, chosen[:count]])
            while ready.size >= most:
                yield ready[:most].copy()
                ready = ready[most:]
        if ready.size:
            yield ready

    def _allocate(self) -> None:
        """Gets one more piece of memory and cuts it into blocks."""
        block = int(self.record_bytes) << int(self.shift)
        block += -block % _LINE
        size = _PIECES[self._level] if self._bytes < _LARGE_FROM else _LARGE_PIECE
        number = max(1, size // block)
        piece = np.empty(number * block + _LINE, np.uint8)
        first = piece.ctypes.data + -piece.ctypes.data % _LINE
        self._pieces.append(piece)
        self._bytes += piece.nbytes
        self._free += [first + each * block for each in reversed(range(number))]


def prepare() -> None:
    """Compiles what this module needs, or loads it from the cache."""
    compile_for(_drop, "(int64, int64, int64, uint64[:, ::1], uint64, uint64, int64[::1])")
    compile_for(_changed_after, "(uint64[::1], int64, uint64[::1])")
