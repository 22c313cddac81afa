"""First values: what they follow from, their distribution, and their very bits."""

from __future__ import annotations

import hashlib
import math
import statistics

import numpy as np
import pytest

from tests.tables.numbers import first_rows, random_bits
from trireme.tables.table_spec import Constant, Initializer, Normal, Uniform, Zeros

KEYS = np.array([0, 1, -1, 2**63 - 1, -(2**63), 77], np.int64)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
def test_constants(dtype: str) -> None:
    assert first_rows(Zeros(), KEYS, 3, dtype).tolist() == [[0, 0, 0]] * 6
    assert first_rows(Constant(7), KEYS, 2, dtype).tolist() == [[7, 7]] * 6


def test_an_integer_constant_keeps_all_its_bits() -> None:
    assert first_rows(Constant(2**63 - 1), KEYS, 1, "int64").tolist() == [[2**63 - 1]] * 6


def test_uniform_numbers_follow_from_seed_key_and_column() -> None:
    rows = first_rows(Uniform(-0.25, 0.5, seed=9), KEYS, 4, "float64")
    expected = [
        [
            -0.25 + 0.75 * ((random_bits(9, int(key), column) >> 11) * 2.0**-53)
            for column in range(4)
        ]
        for key in KEYS
    ]
    assert rows.tolist() == expected


def test_normal_numbers_are_quantiles_of_uniform_ones() -> None:
    keys = np.arange(2000, dtype=np.int64)
    rows = first_rows(Normal(1.0, 2.0, seed=5), keys, 4, "float64")
    quantile = statistics.NormalDist().inv_cdf  # AS 241 too, with the system's logarithm
    expected = np.array(
        [
            [
                1.0 + 2.0 * quantile(((random_bits(5, key, column) >> 12) + 0.5) * 2.0**-52)
                for column in range(4)
            ]
            for key in range(2000)
        ]
    )
    assert np.allclose(rows, expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    ("initializer", "dtype", "expected"),
    [
        (Uniform(-0.1, 0.3, seed=1), "float32", "e604b42d1a92e4f9"),
        (Uniform(-0.1, 0.3, seed=1), "float64", "08e21e5ec8c6d14b"),
        (Normal(0.0, 0.01, seed=2), "float32", "f81aad5b6716614c"),
        (Normal(0.0, 0.01, seed=2), "float64", "ff2461b3afffc1f4"),
    ],
)
def test_the_bits_are_the_same_on_all_machines(
    initializer: Initializer, dtype: str, expected: str
) -> None:
    keys = np.arange(-5000, 5000, dtype=np.int64) * 0x1234567
    rows = first_rows(initializer, keys, 16, dtype).astype(np.dtype(dtype).newbyteorder("<"))
    assert hashlib.sha256(rows.tobytes()).hexdigest()[:16] == expected


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_their_moments(seed: int) -> None:
    keys = np.arange(20_000, dtype=np.int64)
    uniform = first_rows(Uniform(-1.0, 1.0, seed), keys, 10, "float64")
    normal = first_rows(Normal(0.0, 1.0, seed), keys, 10, "float64")
    count = uniform.size
    assert abs(uniform.mean()) < 4 * math.sqrt(1 / 3 / count)
    assert abs(uniform.var() - 1 / 3) < 4 * math.sqrt(4 / 45 / count)
    assert abs(normal.mean()) < 4 / math.sqrt(count)
    assert abs(normal.var() - 1) < 4 * math.sqrt(2 / count)
    assert abs((normal**4).mean() - 3) < 4 * math.sqrt(96 / count)
    correlations = np.corrcoef(normal.T) - np.eye(10)
    assert abs(correlations).max() < 5 / math.sqrt(20_000)


def test_wider_rows_begin_as_narrow_ones_and_seeds_differ() -> None:
    narrow, wide = (first_rows(Normal(seed=3), KEYS, width) for width in (2, 9))
    assert np.array_equal(narrow, wide[:, :2])
    assert not np.isin(first_rows(Normal(seed=4), KEYS, 9), wide).any()
