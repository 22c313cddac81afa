"""The hash of columns and values: as it is stated, and spread evenly."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba")
pytest.importorskip("pyarrow")

from sparse_data import feature
from sparse_data.hashing import hash_bytes, mix

from trireme.errors import ConfigurationError

MASK = (1 << 64) - 1


def stated(column: str, value: bytes) -> int:
    """The hash as its module states it, in Python's integers."""
    state = 0xCBF29CE484222325
    for byte in column.encode() + b"\xff" + value:
        state = (state ^ byte) * 0x100000001B3 & MASK
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & MASK
    state = (state ^ state >> 27) * 0x94D049BB133111EB & MASK
    return state ^ state >> 31


def test_fnv_as_published() -> None:
    data = np.frombuffer(b"foobar", np.uint8)
    assert hash_bytes(np.uint64(0xCBF29CE484222325), data, 0, 6) == 0x85944171F73967E8


def test_the_finaliser_as_published() -> None:
    assert mix(np.uint64(0x9E3779B97F4A7C15)) == 0xE220A8397B1DCDAF, "SplitMix64's first of seed 0"


@pytest.mark.parametrize("bits", [1, 26, 63])
def test_features_are_the_highest_bits(bits: int) -> None:
    for column, value in (("C1", b""), ("C1", b"68fd1e64"), ("C2", b"68fd1e64"), ("é", b"\xff\0")):
        assert feature(column, value, bits) == stated(column, value) >> (64 - bits)
    assert feature("C1", "é", bits) == feature("C1", "é".encode(), bits)


def test_a_column_ends_before_its_value() -> None:
    assert feature("C1", "1", 63) != feature("C", "11", 63)


def test_values_spread_evenly() -> None:
    counts = np.bincount([feature("C1", f"{n:08x}", 6) for n in range(6400)], minlength=64)
    chi_squared = ((counts - 100.0) ** 2 / 100).sum()
    assert 30 < chi_squared < 110, "63 degrees of freedom"


def test_bits_out_of_range() -> None:
    for bits in (0, 64):
        with pytest.raises(ConfigurationError, match=f"bits={bits}: .* 1 to 63 bits"):
            feature("C1", "", bits)
