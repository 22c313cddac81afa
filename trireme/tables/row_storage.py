"""Memory for rows: records in blocks, so that nothing is copied when a large table grows.

A record holds all that a table knows of a key: 8 bytes of the key; 8 bytes of the step of its last
update (upper 40 bits) and its touches (lower 24 bits); the row; the optimizer's state.

The records of a slot are numbered from 0 without gaps. They lie in blocks, and blocks are cut from
larger pieces of memory, which all slots share. A removed record is replaced by the last one of its
slot; a block that becomes empty is used again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trireme.tables.addresses import array_at
from trireme.tables.compiled import compiled
from trireme.tables.keys import SLOTS, Counts, Keys

HEADER_BYTES = 16  # the bytes of a record before its row

_LINE = 64

# The bytes of a block, unless a record is larger. A slot wastes half a block on average.
_BLOCK_BYTES = 1 << 13

# A piece is an eighth of all before it: from 4 MiB on it gets huge pages from numpy, and with them
# faster access, but memory in units of 2 MiB.
_LEAST_PIECE, _LARGEST_PIECE = 1 << 15, 1 << 25

_S24, _S32 = np.uint64(24), np.uint64(32)
_ONE = np.uint64(1)
_TOUCHES = np.uint64((1 << 24) - 1)


class Memory(NamedTuple):
    """The records of a table as kernels take them."""

    blocks: npt.NDArray[np.uint64]  # their addresses, of shape (SLOTS, most blocks)
    shift: np.uint64  # a block holds 2**shift records
    record_bytes: np.uint64


@compiled
def record_address(memory: Any, slot: Any, row: Any) -> Any:
    """Returns the address (uint64) of a record of a slot, by its number (uint64)."""
    within = row & ((_ONE << memory.shift) - _ONE)
    return memory.blocks[slot, row >> memory.shift] + within * memory.record_bytes


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
def _read_headers(addresses: Any, keys: Any, steps: Any, touches: Any) -> None:
    for each in range(addresses.size):
        mark = read_mark(addresses[each])
        keys[each] = read_key(addresses[each])
        steps[each] = np.int64(mark >> _S24)
        touches[each] = np.int64(mark & _TOUCHES)


def headers(addresses: npt.NDArray[np.uint64]) -> tuple[Keys, Counts, Counts]:
    """Returns the keys, last steps and touches of the records at some addresses."""
    keys, steps, touches = (np.empty(addresses.size, np.int64) for _ in range(3))
    _read_headers(addresses, keys, steps, touches)
    return keys, steps, touches


class RowStorage:
    """The records of a table's keys, by slot and number; a payload is a multiple of 4 bytes."""

    def __init__(self, payload_bytes: int) -> None:
        self.counts = np.zeros(SLOTS, np.int64)  # the number of records of each slot
        self._record_bytes = HEADER_BYTES + payload_bytes
        self._shift = max(0, (_BLOCK_BYTES // self._record_bytes).bit_length() - 1)
        self._blocks = np.zeros((SLOTS, 1), np.uint64)
        self._block_counts = np.zeros(SLOTS, np.int64)
        self._pieces: list[npt.NDArray[np.uint8]] = []
        self._free: list[int] = []
        self._bytes = 0

    @property
    def bytes(self) -> int:
        """The bytes that are allocated; the system lends what was never written to others."""
        return self._bytes + self._blocks.nbytes

    @property
    def memory(self) -> Memory:
        """Where the records are."""
        return Memory(self._blocks, np.uint64(self._shift), np.uint64(self._record_bytes))

    def reserve(self, counts: npt.NDArray[np.int64]) -> None:
        """Makes room for a number of records in each slot; with a MemoryError none has changed."""
        needed = -(-counts >> np.int64(self._shift))
        for slot in np.flatnonzero(needed > self._block_counts):
            while self._block_counts[slot] < needed[slot]:
                if not self._free:
                    self._allocate()
                if self._block_counts[slot] == self._blocks.shape[1]:
                    self._blocks = np.hstack([self._blocks, np.zeros_like(self._blocks)])
                self._blocks[slot, self._block_counts[slot]] = self._free.pop()
                self._block_counts[slot] += 1

    def trim(self) -> None:
        """Lets all slots use the blocks that hold no record any more."""
        needed = -(-self.counts >> np.int64(self._shift))
        for slot in np.flatnonzero(self._block_counts > needed):
            spare = self._blocks[slot, needed[slot] : self._block_counts[slot]]
            self._free += spare.tolist()
            self._block_counts[slot] = needed[slot]

    def clear(self, slot: int) -> None:
        """Removes all records of a slot."""
        self.counts[slot] = 0
        self.trim()

    def addresses(self, slot: int) -> npt.NDArray[np.uint64]:
        """Returns the addresses of all records of a slot, uint64 of shape (records,)."""
        rows = np.arange(self.counts[slot])
        starts = self._blocks[slot, rows >> self._shift]
        within = rows & ((1 << self._shift) - 1)
        addresses: npt.NDArray[np.uint64] = starts + (within * self._record_bytes).astype(np.uint64)
        return addresses

    def records(self, slots: Iterable[int], most: int) -> Iterator[npt.NDArray[np.uint64]]:
        """Yields the addresses of the records of some slots, so many at a time."""
        ready = np.empty(0, np.uint64)
        for slot in filter(self.counts.__getitem__, slots):  # many a slot is empty
            ready = np.concatenate([ready, self.addresses(slot)])
            while ready.size >= most:
                yield ready[:most].copy()
                ready = ready[most:]
        if ready.size:
            yield ready

    def _allocate(self) -> None:
        block = self._record_bytes << self._shift
        block += -block % _LINE
        number = max(1, min(max(self._bytes >> 3, _LEAST_PIECE), _LARGEST_PIECE) // block)
        piece = np.empty(number * block + _LINE, np.uint8)
        first = piece.ctypes.data + -piece.ctypes.data % _LINE
        self._pieces.append(piece)
        self._bytes += piece.nbytes
        self._free += [first + each * block for each in reversed(range(number))]
