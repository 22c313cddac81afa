"""Keys: where they belong, and batches in which they repeat.

A key is any int64. Its *hash* decides all else: the upper 8 bits are its slot, the unit of
placement on servers. Where a key is within a slot, or a batch, follows from its hash and a random
number too: see `trireme.tables.row_index`.
"""

from __future__ import annotations

from secrets import randbits
from typing import Any

import numpy as np
import numpy.typing as npt

from trireme.tables.compiled import compiled

Keys = npt.NDArray[np.int64]  # keys of rows, of shape (n,)

Counts = npt.NDArray[np.int64]  # steps, places or numbers, of shape (n,)

SLOTS = 256  # the slots of a table, as many as those of a job's dense parameters

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)
_SLOT_SHIFT = np.uint64(56)
_ONE = np.uint64(1)


def plain(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns the array, or a copy where it has gaps, is read-only or lies at an odd address.

    Kernels are compiled ahead for arrays without these properties.
    """
    usable: npt.NDArray[Any] = np.require(array, requirements=["C", "A", "W"])
    return usable


@compiled
def mix(key: Any) -> Any:
    """Returns the uint64 hash of a key: one step of SplitMix64 from it.

    A bijection in which each bit of the key changes each bit of the hash with a probability near
    one half. Source: Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators (OOPSLA
    2014), figure 17, with the constants of Stafford's mix 13.
    """
    value = np.uint64(key) + _GOLDEN
    value = (value ^ (value >> _S30)) * _FIRST
    value = (value ^ (value >> _S27)) * _SECOND
    return value ^ (value >> _S31)


@compiled
def mix_with(hashed: Any, secret: Any) -> Any:
    """Returns another uint64 hash, which nobody can foretell who does not know a random number."""
    return mix(hashed ^ secret)


@compiled
def slot_of(key: Any) -> Any:
    """Returns the slot of a key, from 0 to `SLOTS` - 1."""
    return np.int64(mix(key) >> _SLOT_SHIFT)


@compiled
def _slots_of(keys: Any) -> Any:
    slots = np.empty(keys.size, np.int64)
    for place in range(keys.size):
        slots[place] = slot_of(keys[place])
    return slots


@compiled
def _unique(keys: Any, secret: Any) -> Any:
    bits = np.uint64(4)
    while (np.int64(1) << np.int64(bits)) < 2 * keys.size:
        bits += _ONE
    shift = np.uint64(64) - bits
    most = (_ONE << bits) - _ONE
    numbers = np.full(np.int64(most) + 1, -1, np.int32)  # by hash: which unique key is there
    unique = np.empty(keys.size, np.int64)
    inverse = np.empty(keys.size, np.int64)
    count = 0
    for place in range(keys.size):
        key = keys[place]
        bucket = mix_with(np.uint64(key), secret) >> shift
        number = numbers[bucket]
        while number >= 0 and unique[number] != key:
            bucket = (bucket + _ONE) & most
            number = numbers[bucket]
        if number < 0:
            number = np.int32(count)
            numbers[bucket] = number
            unique[count] = key
            count += 1
        inverse[place] = number
    return unique[:count], inverse


@compiled
def _sum_rows(rows: Any, inverse: Any, sums: Any) -> None:
    for place in range(inverse.size):
        number = inverse[place]
        for column in range(rows.shape[1]):
            sums[number, column] += rows[place, column]


def slots_of(keys: Keys) -> Counts:
    """Returns the slot of each key."""
    slots: Counts = _slots_of(plain(keys))
    return slots


def unique(keys: Keys) -> tuple[Keys, Counts]:
    """Returns each key once, as they first appear, and for each key its place among these."""
    found: tuple[Keys, Counts] = _unique(plain(keys), np.uint64(randbits(64)))
    return found


def sum_rows(rows: npt.NDArray[Any], inverse: Counts, count: int) -> npt.NDArray[Any]:
    """Returns the sum of the rows of each number in `inverse`, added in the order of the batch."""
    sums = np.zeros((count, rows.shape[1]), rows.dtype)
    _sum_rows(plain(rows), plain(inverse), sums)
    return sums


def split(keys: Keys, owners: Counts, parts: int) -> tuple[Counts, Counts]:
    """Divides keys among the owners of their slots, such as servers.

    Returns the places of the keys, grouped by owner and in their order within one; and where each
    group begins and the last one ends, of shape (parts + 1,).
    """
    found = owners[slots_of(keys)].astype(np.uint8)  # a job has at most `SLOTS` servers
    ends = np.concatenate([[0], np.bincount(found, minlength=parts).cumsum()])
    return np.argsort(found, kind="stable"), ends
