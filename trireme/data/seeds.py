"""Independent random streams from one seed, by arithmetic alone.

The numbers drawn for an epoch or a batch must not depend on the process, the time or the version of
a library. So seeds are derived and not passed on: `derive(seed, epoch)` identifies a stream.
The mixing function is SplitMix64's (Steele, Lea, Flood: Fast splittable pseudorandom number
generators, OOPSLA 2014, figure 15).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MASK = 0xFFFFFFFFFFFFFFFF
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(value: int) -> int:
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def derive(seed: int, *path: int) -> int:
    """Returns the seed of the stream that `path` names below `seed`, in [0, 2^63).

    The same numbers give the same seed on every machine. Other numbers, or the same numbers in
    another order, give an independent seed.
    """
    state = _mix((seed + _GOLDEN) & _MASK)
    for part in path:
        state = _mix((_mix((part + _GOLDEN) & _MASK) + state * 3 + _GOLDEN) & _MASK)
    return state >> 1


def permutation(size: int, seed: int) -> npt.NDArray[np.int64]:
    """Returns the numbers 0 to size - 1 in an order that depends on `size` and `seed` alone.

    Each number gets a 64-bit key, no two the same, and the keys are sorted: unlike the shuffles of
    random libraries, the result never changes with a version, so a data position saved in a
    checkpoint means the same examples for good.
    """
    return np.argsort(_keys(size, seed)).astype(np.int64, copy=False)


def _keys(size: int, seed: int) -> npt.NDArray[np.uint64]:
    """Returns `size` random numbers of 64 bits, no two the same."""
    key = np.arange(1, size + 1, dtype=np.uint64)
    key *= np.uint64(_GOLDEN)
    key += np.uint64(seed & _MASK)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        key ^= key >> np.uint64(shift)
        key *= np.uint64(factor)
    key ^= key >> np.uint64(31)
    return key
