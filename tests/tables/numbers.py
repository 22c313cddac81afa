"""What kernels compute, once more in plain Python: integers without bounds, and its floats."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from trireme.tables.initializers import FirstValues
from trireme.tables.row_values import gather
from trireme.tables.table_spec import Initializer

_BITS = (1 << 64) - 1


def splitmix(state: int) -> int:
    """The output of SplitMix64 for a state, as in the paper."""
    z = (state + 0x9E3779B97F4A7C15) & _BITS
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _BITS
    return z ^ (z >> 31)


def random_bits(seed: int, key: int, column: int) -> int:
    """The 64 random bits of an element."""
    start = splitmix(splitmix(key & _BITS) ^ seed)
    return splitmix((start + column * 0x9E3779B97F4A7C15) & _BITS)


def _unshift(value: int, shift: int) -> int:
    """Inverts z ^ (z >> shift)."""
    result = value
    for _ in range(64 // shift):
        result = value ^ (result >> shift)
    return result


def keys_with_hashes(hashes: Iterable[int]) -> list[int]:
    """The keys that have these hashes: what somebody would choose whose keys are to collide."""
    keys = []
    for hashed in hashes:
        z = _unshift(hashed & _BITS, 31) * pow(0x94D049BB133111EB, -1, 1 << 64) & _BITS
        z = _unshift(z, 27) * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & _BITS
        z = (_unshift(z, 30) - 0x9E3779B97F4A7C15) & _BITS
        assert splitmix(z) == hashed & _BITS
        keys.append(z - (1 << 64) if z >> 63 else z)
    return keys


def keys_in_one_line(slot: int, home: int, count: int, tag: int | None = None) -> list[int]:
    """Keys of one slot with one home, for an index whose number is 0, and with one tag or any.

    Args:
        slot: the slot.
        home: 32 bits that decide the home.
        count: how many keys.
        tag: the tag's 8 bits.
    """
    keys: list[int] = []
    for free in range(1 << 24):
        low = free & 255 if tag is None else tag
        placed = (free >> 16) << 56 | home << 24 | (free & 0xFFFF) << 8 | low
        (hashed,) = keys_with_hashes([placed])
        if (hashed & _BITS) >> 56 == slot:
            keys += keys_with_hashes([hashed & _BITS])
        if len(keys) == count:
            break
    return keys


def first_rows(
    initializer: Initializer, keys: npt.ArrayLike, width: int, dtype: str = "float32"
) -> npt.NDArray[Any]:
    """The first values of keys, of which no table has a record."""
    asked = np.asarray(keys, np.int64)
    rows = np.empty((asked.size, width), dtype)
    gather(np.zeros(asked.size, np.uint64), asked, rows, FirstValues.of(initializer, dtype))
    return rows
