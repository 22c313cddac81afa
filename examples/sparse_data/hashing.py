"""Features of named values: a 64-bit hash of column and value.

The hash is FNV-1a (64 bits) over the bytes of the column's name, one byte 0xFF, which UTF-8 never
has, and the bytes of the value; then the finaliser of SplitMix64 (Steele, Lea, Flood: Fast
Splittable Pseudorandom Number Generators, OOPSLA 2014), for FNV leaves the highest bits of short
strings nearly constant. A feature among 2^bits is the highest bits of that.
"""

from __future__ import annotations

import numpy as np

from trireme.errors import ConfigurationError
from trireme.tables.compiled import compiled

_OFFSET = 0xCBF29CE484222325
_PRIME = np.uint64(0x100000001B3)
_SEPARATOR = b"\xff"
MOST_BITS = 63
"""The most bits of a feature: it is an int64 of 0 or more."""


def feature(column: str, value: str | bytes, bits: int) -> int:
    """Returns the feature of a value in a column, as readers of `bits` bits have it.

    Args:
        column: the column's name.
        value: the value; text as UTF-8.
        bits: the logarithm of the number of features, to the base 2.

    Raises:
        ConfigurationError: `bits` is not between 1 and 63.
    """
    check_bits(bits)
    data = value.encode() if isinstance(value, str) else value
    text = np.frombuffer(data, np.uint8)
    state = np.uint64(hash_bytes(column_state(column), text, 0, len(text)))
    return int(feature_of(state, np.uint64(bits)))


def check_bits(bits: int) -> None:
    """Checks the logarithm of a number of features.

    Raises:
        ConfigurationError: it is not between 1 and 63.
    """
    if not 1 <= bits <= MOST_BITS:
        raise ConfigurationError(f"bits={bits}: the features are numbered with 1 to 63 bits")


def column_state(column: str) -> np.uint64:
    """Returns the state of the hash after a column's name."""
    data = np.frombuffer(column.encode() + _SEPARATOR, np.uint8)
    return np.uint64(hash_bytes(np.uint64(_OFFSET), data, 0, len(data)))


@compiled
def hash_bytes(state: np.uint64, data: np.ndarray, start: int, stop: int) -> np.uint64:
    """Returns the state of FNV-1a after the bytes `data[start:stop]`."""
    for index in range(start, stop):
        state = (state ^ np.uint64(data[index])) * _PRIME
    return state


@compiled
def feature_of(state: np.uint64, bits: np.uint64) -> np.int64:
    """Returns the highest bits of a state's finalised hash."""
    mixed = mix(state)
    return np.int64(mixed >> (np.uint64(64) - bits))


@compiled
def mix(state: np.uint64) -> np.uint64:
    """Returns the finaliser of SplitMix64, a bijection of 64-bit numbers."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
