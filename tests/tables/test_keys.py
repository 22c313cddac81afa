"""Keys: their slots, batches without repetitions, and their division among servers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tables.numbers import keys_with_hashes, splitmix
from trireme.ps.layout import DEFAULT_SLOTS
from trireme.tables.keys import SLOTS, mix_with, slots_of, split, sum_rows, unique

EDGES = [0, 1, -1, 2**63 - 1, -(2**63)]
KEYS = st.lists(st.sampled_from(EDGES) | st.integers(-(2**63), 2**63 - 1) | st.integers(0, 9))


def test_a_table_has_as_many_slots_as_the_dense_parameters() -> None:
    assert SLOTS == DEFAULT_SLOTS


def test_the_slot_of_a_key_never_changes() -> None:
    keys = np.array([*EDGES, 12345], np.int64)
    assert slots_of(keys).tolist() == [splitmix(int(key)) >> 56 for key in keys]
    assert slots_of(np.array([0], np.int64)).tolist() == [0xE2]  # SplitMix64's first, of seed 0


@pytest.mark.parametrize("stride", [1, 256, 1 << 32, -(1 << 40)])
def test_slots_are_equally_full_whatever_the_keys_have_in_common(stride: int) -> None:
    keys = np.arange(100_000, dtype=np.int64) * stride
    counts = np.bincount(slots_of(keys), minlength=SLOTS)
    assert counts.min() > 290 and counts.max() < 500  # the mean is 391, its deviation 20


@given(KEYS)
def test_unique_keys_come_in_the_order_of_their_first_appearance(keys: list[int]) -> None:
    batch = np.array(keys, np.int64)
    found, inverse = unique(batch)
    assert found.tolist() == list(dict.fromkeys(keys))
    assert np.array_equal(found[inverse], batch)


@given(KEYS, st.sampled_from(["float32", "float64", "int32", "int64"]))
def test_rows_of_one_key_are_added_in_the_order_of_the_batch(keys: list[int], dtype: str) -> None:
    batch = np.array(keys, np.int64)
    rows = (np.arange(3 * len(keys)).reshape(-1, 3) + 1).astype(dtype) / np.array(3).astype(dtype)
    rows = np.ascontiguousarray(rows.astype(dtype))
    found, inverse = unique(batch)
    expected = np.zeros((found.size, 3), dtype)
    np.add.at(expected, inverse, rows)
    sums = sum_rows(rows, inverse, found.size)
    assert sums.dtype == dtype
    assert np.array_equal(sums, expected)


@given(KEYS, st.integers(1, 7))
def test_keys_are_divided_by_the_owner_of_their_slot(keys: list[int], parts: int) -> None:
    batch = np.array(keys, np.int64)
    owners = np.arange(SLOTS, dtype=np.int64) * parts // SLOTS
    order, ends = split(batch, owners, parts)
    assert sorted(order.tolist()) == list(range(len(keys)))
    assert ends[0] == 0 and ends[-1] == len(keys)
    for part in range(parts):
        places = order[ends[part] : ends[part + 1]]
        assert (owners[slots_of(batch[places])] == part).all()
        assert (np.diff(places) > 0).all()


def test_keys_that_somebody_has_chosen_are_spread_over_the_search_for_unique_ones() -> None:
    """Keys of one slot had 128 of 32,768 places, side by side, where places followed from them."""
    chosen = np.array(keys_with_hashes((11 << 56) | each for each in range(1 << 14)), np.int64)
    places = {
        int(mix_with(np.uint64(key & (1 << 64) - 1), np.uint64(7))) >> 49 for key in chosen.tolist()
    }
    assert len(places) > 1 << 13
    batch = np.concatenate([chosen, chosen[::-1]])
    assert unique(batch)[0].tolist() == chosen.tolist()
