"""From a key to its record: open addressing, one small index for each slot.

An entry is 4 bytes: 8 bits of the key's hash, and the number of the record within its slot. Keys
are not repeated in it: they are in the records. Eight bits tell nearly all other keys apart, so a
search reads one line of the index and the record that is wanted anyway. Entries are found by linear
probing from a home, the first place of a line of 16 entries. The index of a slot grows by 1.4 when
it is four fifths full, by itself, and is rebuilt from the records. A removal moves the entries
behind it back (Knuth, The Art of Computer Programming, volume 3, section 6.4, algorithm R).

Home and tag follow from the key's hash and a random number that each index draws for itself: else
whoever chooses keys, such as the ids of users, could choose many of one home, and a search would
read them all (Crosby and Wallach, Denial of Service via Algorithmic Complexity Attacks, 2003).
"""

from __future__ import annotations

from collections import deque
from secrets import randbits
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trireme.errors import Rejected
from trireme.tables.addresses import array_at, lowest_bit, read_ahead, upper_bytes_equal
from trireme.tables.compiled import compiled
from trireme.tables.keys import SLOTS, Keys, mix, mix_with, slots_of
from trireme.tables.row_storage import (
    Memory,
    RowStorage,
    copy_record,
    headers,
    read_key,
    record_address,
    write_key,
    write_mark,
)

Addresses = npt.NDArray[np.uint64]  # addresses of records, of shape (n,); 0 where there is none

MOST_RECORDS = (1 << 24) - 1  # the most records of a slot: four thousand million in a table

_MOST_RECENT = 1 << 20  # keys of a batch that is remembered: 16 MiB
_GROWTH = 1.4
_EMPTY = np.uint32(0xFFFFFFFF)
_ROW = np.uint32(0xFFFFFF)
_ENTRIES = 16  # of a line
_LINE = np.uint64(_ENTRIES)
_MOST_TAG = np.uint64(254)  # an empty entry looks like 255
_S4, _S24, _S32, _S56 = np.uint64(4), np.uint64(24), np.uint64(32), np.uint64(56)
_TAG_SHIFT = np.uint32(24)
_BITS8, _BITS32 = np.uint64(0xFF), np.uint64(0xFFFFFFFF)
_ZERO, _ONE, _FOUR = np.uint64(0), np.uint64(1), np.uint64(4)
_LINE_BYTES = np.uint64(64)
_GROUP = 64  # keys whose memory is asked for together
_SWEPT = 1 << 16  # records whose steps are looked at together


class Places(NamedTuple):
    """An index as kernels take it; arrays are by slot."""

    indices: npt.NDArray[np.uint64]  # the address of the entries
    capacities: npt.NDArray[np.uint64]  # how many entries there are
    secret: np.uint64  # the index's random number
    memory: Memory  # the records


@compiled
def _home(placed: Any, capacity: Any) -> Any:
    return ((((placed >> _S24) & _BITS32) * (capacity >> _S4)) >> _S32) << _S4


@compiled
def _tag(placed: Any) -> Any:
    return np.uint32(min(placed & _BITS8, _MOST_TAG))


@compiled
def _search(key: Any, slot: Any, placed: Any, at: Any) -> Any:
    """Returns place and record of a key, searching from its home on; the record is 0 for none."""
    capacity = at.capacities[slot]
    entries = array_at(at.indices[slot], np.int64(capacity), np.uint32)
    tag = _tag(placed)
    place = _home(placed, capacity)
    while True:
        entry = entries[place]
        if entry == _EMPTY:
            return place, _ZERO
        if entry >> _TAG_SHIFT == tag:
            address = record_address(at.memory, slot, np.uint64(entry & _ROW))
            if read_key(address) == key:
                return place, address
        place += _ONE
        if place == capacity:
            place = _ZERO


@compiled
def search(keys: Any, at: Any, found: Any) -> Any:
    """Writes the address of the record of each key, 0 for none; returns how many have none."""
    slots = np.empty(_GROUP, np.uint64)
    places = np.empty(_GROUP, np.uint64)
    lines = np.empty(_GROUP, np.uint64)
    missing = 0
    for first in range(0, keys.size, _GROUP):
        size = min(_GROUP, keys.size - first)
        for each in range(size):
            hashed = mix(keys[first + each])
            slot = hashed >> _S56
            placed = mix_with(hashed, at.secret)
            line = at.indices[slot] + _home(placed, at.capacities[slot]) * _FOUR
            read_ahead(line)
            slots[each] = slot
            places[each] = placed
            lines[each] = line
        for each in range(size):  # the first entry with the key's tag is nearly always its own
            place = lowest_bit(upper_bytes_equal(lines[each], _tag(places[each])))
            address = _ZERO
            if place < _LINE:
                row = np.uint64(array_at(lines[each], _ENTRIES, np.uint32)[place] & _ROW)
                address = record_address(at.memory, slots[each], row)
                read_ahead(address)
                read_ahead(address + _LINE_BYTES)
            found[first + each] = address
        for each in range(size):
            key = keys[first + each]
            address = found[first + each]
            if address == _ZERO or read_key(address) != key:
                _, address = _search(key, slots[each], places[each], at)
                found[first + each] = address
                missing += address == _ZERO
    return missing


@compiled
def _add(keys: Any, marks: Any, at: Any, counts: Any, addresses: Any, fresh: Any) -> Any:
    added = 0
    for each in range(keys.size):
        key = keys[each]
        hashed = mix(key)
        slot = hashed >> _S56
        placed = mix_with(hashed, at.secret)
        place, address = _search(key, slot, placed, at)
        if address == _ZERO:
            row = np.uint64(counts[slot])
            counts[slot] += 1
            address = record_address(at.memory, slot, row)
            write_key(address, key)
            write_mark(address, marks[each])
            entries = array_at(at.indices[slot], np.int64(at.capacities[slot]), np.uint32)
            entries[place] = (_tag(placed) << _TAG_SHIFT) | np.uint32(row)
            fresh[added] = each
            added += 1
        addresses[each] = address
    return added


@compiled
def _close_gap(gap: Any, slot: Any, entries: Any, at: Any) -> None:
    capacity = at.capacities[slot]
    place = gap
    while True:
        place = place + _ONE if place + _ONE < capacity else _ZERO
        entry = entries[place]
        if entry == _EMPTY:
            break
        key = read_key(record_address(at.memory, slot, np.uint64(entry & _ROW)))
        home = _home(mix_with(mix(key), at.secret), capacity)
        from_home = place - home if place >= home else place + capacity - home
        from_gap = place - gap if place >= gap else place + capacity - gap
        if from_home >= from_gap:
            entries[gap] = entry
            gap = place
    entries[gap] = _EMPTY


@compiled
def _remove(keys: Any, at: Any, counts: Any) -> Any:
    removed = 0
    for each in range(keys.size):
        hashed = mix(keys[each])
        slot = hashed >> _S56
        place, address = _search(keys[each], slot, mix_with(hashed, at.secret), at)
        if address == _ZERO:
            continue
        entries = array_at(at.indices[slot], np.int64(at.capacities[slot]), np.uint32)
        removed += 1
        counts[slot] -= 1
        last = record_address(at.memory, slot, np.uint64(counts[slot]))
        if last != address:
            key = read_key(last)
            moved, _ = _search(key, slot, mix_with(mix(key), at.secret), at)
            entries[moved] = (entries[moved] & ~_ROW) | (entries[place] & _ROW)
            copy_record(last, address, at.memory.record_bytes)
        _close_gap(place, slot, entries, at)
    return removed


@compiled
def _rebuild(slot: Any, count: Any, entries: Any, secret: Any, memory: Any) -> None:
    capacity = np.uint64(entries.size)
    for place in range(entries.size):
        entries[place] = _EMPTY
    for row in range(count):
        address = record_address(memory, slot, np.uint64(row))
        placed = mix_with(mix(read_key(address)), secret)
        at = _home(placed, capacity)
        while entries[at] != _EMPTY:
            at += _ONE
            if at == capacity:
                at = _ZERO
        entries[at] = (_tag(placed) << _TAG_SHIFT) | np.uint32(row)


def _aligned_entries(capacity: int) -> npt.NDArray[np.uint32]:
    """Returns an array of entries whose lines are lines of the cache."""
    array = np.empty(capacity + _ENTRIES, np.uint32)
    first = -array.ctypes.data % 64 // 4
    return array[first : first + capacity]


class RowIndex:
    """Finds, adds and removes the records of keys in a storage, which belongs to it alone."""

    def __init__(self, storage: RowStorage) -> None:
        self.storage = storage
        self._secret = np.uint64(randbits(64))
        self._nothing = _aligned_entries(_ENTRIES)  # the index of a slot without keys
        self._nothing[:] = _EMPTY
        self._entries = [self._nothing] * SLOTS
        self._indices = np.full(SLOTS, self._nothing.ctypes.data, np.uint64)
        self._capacities = np.full(SLOTS, _ENTRIES, np.uint64)

    def __len__(self) -> int:
        return int(self.storage.counts.sum())

    @property
    def bytes(self) -> int:
        """The bytes of the entries."""
        return sum(each.nbytes for each in self._entries if each is not self._nothing)

    @property
    def places(self) -> Places:
        """Where everything is, for kernels."""
        return Places(self._indices, self._capacities, self._secret, self.storage.memory)

    def find(self, keys: Keys) -> tuple[Addresses, int]:
        """Returns the address of the record of each key, and the number of keys without one."""
        found = np.empty(keys.size, np.uint64)
        missing: int = search(keys, self.places, found)
        return found, missing

    def check_room(self, keys: Keys) -> npt.NDArray[np.int64]:
        """Returns how many keys without a record each slot gets; Rejected if one has no room."""
        more = np.bincount(slots_of(keys), minlength=SLOTS)
        needed = self.storage.counts + more
        if needed.max() > MOST_RECORDS:
            raise Rejected(
                f"slot {needed.argmax()} of a table would have {needed.max()} keys; a slot has at "
                f"most {MOST_RECORDS}. Keys fall into slots by their hash, so these are too many "
                "or chosen to collide"
            )
        return more

    def reserve(self, keys: Keys) -> None:
        """Makes room for keys without a record, or raises as `check_room`, or MemoryError."""
        more = self.check_room(keys)
        needed = self.storage.counts + more
        self.storage.reserve(needed)
        full = (needed * 5 > self._room()) & (more > 0)
        for place in np.flatnonzero(full):
            self._resize(int(place), int(needed[place]))

    def add(
        self, keys: Keys, marks: npt.NDArray[np.uint64]
    ) -> tuple[Addresses, npt.NDArray[np.int64]]:
        """Adds records of keys, for which there is room; only their headers are written.

        Returns the address of each key's record, and the places of the new ones among `keys`.
        """
        addresses = np.empty(keys.size, np.uint64)
        fresh = np.empty(keys.size, np.int64)
        added = _add(keys, marks, self.places, self.storage.counts, addresses, fresh)
        return addresses, fresh[:added]

    def remove(self, keys: Keys) -> int:
        """Removes the records of those of the keys that have one, and returns their number.

        Other records may move: addresses that were found before are no longer valid.
        """
        counts = self.storage.counts
        removed: int = _remove(keys, self.places, counts)
        if removed:
            self.storage.trim()
            sparse = counts * 16 < self._room() - 16 * _ENTRIES
            for slot in np.flatnonzero(sparse):
                self._resize(int(slot), int(counts[slot]) * 3 // 2)
        return removed

    def drop(self, oldest: int) -> int:
        """Removes the records whose last step is below `oldest`, and returns their number."""
        found = (headers(each) for each in self.storage.records(range(SLOTS), _SWEPT))
        old = [keys[steps < oldest] for keys, steps, _ in found]
        return self.remove(np.concatenate(old)) if old else 0

    def clear(self, slot: int) -> None:
        """Removes all records of a slot."""
        self.storage.clear(slot)
        self._resize(slot, 0)

    def _room(self) -> npt.NDArray[np.int64]:
        unused = self._indices == self._nothing.ctypes.data
        return np.where(unused, 0, self._capacities.astype(np.int64) * 4)

    def _resize(self, slot: int, needed: int) -> None:
        """Rebuilds the index of a slot, large enough for a number of records."""
        entries = self._nothing
        if needed:
            lines = _GROWTH ** (slot / SLOTS)
            while needed * 5 > int(lines) * _ENTRIES * 4:
                lines *= _GROWTH
            capacity = int(lines) * _ENTRIES
            entries = self._entries[slot]
            if capacity != entries.size or entries is self._nothing:
                entries = _aligned_entries(capacity)
            _rebuild(slot, self.storage.counts[slot], entries, self._secret, self.storage.memory)
        self._entries[slot] = entries
        self._indices[slot] = entries.ctypes.data
        self._capacities[slot] = entries.size


class RecentSearches:
    """Remembers where the keys of the last few batches are, as long as no record moves.

    A worker pushes the keys that it has pulled a moment before, and a comparison of two batches
    costs a fiftieth of a search.
    """

    def __init__(self) -> None:
        self._kept: deque[tuple[Keys, Addresses]] = deque(maxlen=8)

    def find(self, keys: Keys) -> Addresses | None:
        """Takes the addresses of keys out, if exactly these were searched for: they are pushed."""
        if not keys.size:
            return None
        for place, (known, addresses) in enumerate(self._kept):
            if known.size == keys.size and known[-1] == keys[-1] and np.array_equal(known, keys):
                del self._kept[place]
                return addresses
        return None

    def keep(self, keys: Keys, addresses: Addresses) -> None:
        """Remembers a batch all of whose keys have records, unless it is very large."""
        if 0 < keys.size <= _MOST_RECENT:
            self._kept.append((keys.copy(), addresses))

    def clear(self) -> None:
        """Forgets all, because records may have moved."""
        self._kept.clear()
