"""The index and the storage: keys and their records, however they collide, grow and go."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.tables.numbers import keys_in_one_line, keys_with_hashes
from trireme.tables import row_index, row_storage
from trireme.tables.keys import SLOTS, slots_of
from trireme.tables.row_index import RowIndex
from trireme.tables.row_storage import RowStorage
from trireme.tables.row_storage import headers as headers_at


def headers(index: RowIndex, keys: np.ndarray) -> list[tuple[int, int, int]]:  # type: ignore[type-arg]
    """Key, step and touches of the records of keys, all of which have one."""
    addresses, missing = index.find(keys)
    assert missing == 0
    return list(zip(*(column.tolist() for column in headers_at(addresses)), strict=True))


def add(index: RowIndex, keys: list[int], step: int) -> None:
    batch = np.array(keys, np.int64)
    index.reserve(batch)
    index.add(batch, np.full(batch.size, step << 24 | 1, np.uint64))


EDGES = [0, 1, -1, 2**63 - 1, -(2**63)]
ONE_LINE = keys_in_one_line(7, 0x12345678, 40, tag=255)
"""Keys of one slot, with one home and one tag, the tag that an empty entry nearly has."""
_SAME_SLOT = keys_with_hashes(
    (9 << 56) | (each * 0x9E3779B97F4A7C15 & (1 << 56) - 1) for each in range(6000)
)
ONE_SLOT, LATER = _SAME_SLOT[:4000], _SAME_SLOT[4000:]
LAST_LINE = keys_in_one_line(3, 0xFFFFFFFF, 60)
"""Keys of one slot whose home is the last line of the index: their search goes round."""


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are small, and these keys collide."""
    monkeypatch.setattr(row_index, "randbits", lambda bits: 0)
    monkeypatch.setattr(row_storage, "_BLOCK_BYTES", 1 << 7)


class IndexMachine(RuleBasedStateMachine):
    """An index against a dict, over keys that collide."""

    known = (*EDGES, *ONE_LINE[:25], *LAST_LINE[:25], *ONE_SLOT[:25])
    keys = st.lists(st.sampled_from(known), min_size=1, max_size=60)

    def __init__(self) -> None:
        super().__init__()
        self.index = RowIndex(RowStorage(4))
        self.model: dict[int, int] = {}
        self.step = 0

    @rule(keys=keys)
    def add(self, keys: list[int]) -> None:
        self.step += 1
        add(self.index, keys, self.step)
        for key in keys:
            self.model.setdefault(key, self.step)

    @rule(keys=keys)
    def remove(self, keys: list[int]) -> None:
        gone = set(keys) & set(self.model)
        assert self.index.remove(np.array(keys, np.int64)) == len(gone)
        for key in gone:
            del self.model[key]

    @rule(ago=st.integers(0, 5))
    def drop(self, ago: int) -> None:
        oldest = self.step - ago
        gone = {key for key, step in self.model.items() if step < oldest}
        assert self.index.drop(oldest) == len(gone)
        for key in gone:
            del self.model[key]

    @rule(slot=st.sampled_from([3, 7, 9, *range(20)]))
    def clear(self, slot: int) -> None:
        self.index.clear(slot)
        for key in [key for key in self.model if slots_of(np.array([key]))[0] == slot]:
            del self.model[key]

    @invariant()
    def holds_the_same(self) -> None:
        assert len(self.index) == len(self.model)
        keys = np.array(list(self.model), np.int64)
        assert headers(self.index, keys) == [(key, step, 1) for key, step in self.model.items()]
        others = np.array([key for key in self.known if key not in self.model], np.int64)
        assert self.index.find(others)[1] == others.size


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(stateful_step_count=20)


@pytest.mark.parametrize("keys", [ONE_SLOT, list(range(-30_000, 30_000))], ids=["slot", "all"])
def test_growth_and_removal_in_any_order(keys: list[int]) -> None:
    index = RowIndex(RowStorage(4))
    for first in range(0, len(keys), 1000):
        add(index, keys[first : first + 1000], first // 1000 + 1)
    assert len(index) == len(keys)
    found = headers(index, np.array(keys, np.int64))
    assert found == [(key, place // 1000 + 1, 1) for place, key in enumerate(keys)]
    order = np.random.default_rng(0).permutation(np.array(keys, np.int64))
    half = order.size // 2
    assert index.remove(order[:half]) == half
    assert index.find(order[:half])[1] == half
    assert index.find(order[half:])[1] == 0
    later = np.array(LATER if keys is ONE_SLOT else range(1 << 40, (1 << 40) + half), np.int64)
    add(index, later.tolist(), 99)  # where the removed ones were
    assert index.find(order[half:])[1] == 0
    full = index.bytes
    assert index.remove(later) == half == later.size
    assert index.remove(order) == order.size - half
    assert len(index) == 0 and index.bytes < full // 4


def test_a_slot_grows_by_itself_and_by_less_than_half() -> None:
    index, sizes = RowIndex(RowStorage(4)), []
    for first in range(0, 4000, 50):
        add(index, ONE_SLOT[first : first + 50], 1)
        sizes.append(index.bytes)
    grown = [new / old for old, new in pairwise(sizes[8:]) if new != old]
    assert grown and max(grown) < 1.55
    assert sizes[-1] <= 4 * 4000 / 0.8 * 1.45


def test_slots_of_a_large_table_do_not_grow_at_once() -> None:
    index, sizes = RowIndex(RowStorage(0)), []
    for first in range(0, 600_000, 10_000):
        keys = np.arange(first, first + 10_000, dtype=np.int64)
        index.reserve(keys)
        index.add(keys, np.zeros(keys.size, np.uint64))
        sizes.append(index.bytes)
    growth = np.diff(sizes[20:]) / sizes[20:-1]
    assert growth.max() < 0.12  # a table of twice the size has room for 5% more in each of these


def test_blocks_of_removed_records_are_used_again() -> None:
    index = RowIndex(RowStorage(1000))
    add(index, list(range(20_000)), 1)
    size = index.storage.bytes
    for step in range(2, 6):
        assert index.drop(step) == 20_000
        add(index, list(range(step * 20_000, (step + 1) * 20_000)), step)
    assert index.storage.bytes < 1.3 * size


@pytest.mark.parametrize("payload", [0, 4, 68, 1 << 19])
def test_records_are_aligned_and_do_not_overlap(payload: int) -> None:
    storage = RowStorage(payload)
    index = RowIndex(storage)
    add(index, list(range(300)), 1)
    addresses = np.sort(np.concatenate([storage.addresses(slot) for slot in range(SLOTS)]))
    assert addresses.size == 300
    assert (addresses % 4 == 0).all()
    assert (np.diff(addresses) >= 16 + payload).all()
    found, _ = index.find(np.arange(300))
    assert np.array_equal(np.sort(found), addresses)


CHOSEN = keys_with_hashes((11 << 56) | (each << 8) | 42 for each in range(1 << 14))
"""Keys of one slot that had one home and one tag where these followed from the key alone."""


def longest_run(index: RowIndex, slot: int) -> int:
    """The most entries in a row that are taken: what a search may have to read."""
    taken = index._entries[slot] != 0xFFFFFFFF
    ends = np.flatnonzero(np.diff(np.concatenate([[False], taken, [False]]).astype(np.int8)))
    return int((ends[1::2] - ends[::2]).max())


def test_keys_that_somebody_has_chosen_are_spread_over_their_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()  # as an index is made
    chosen, others = (RowIndex(RowStorage(0)) for _ in range(2))
    add(chosen, CHOSEN, 1)
    add(others, _SAME_SLOT + list(range(100_000)), 1)
    assert longest_run(chosen, 11) < len(CHOSEN) // 8, "of one home they were one run"
    assert chosen._secret != others._secret


def test_records_lie_in_the_order_in_which_they_came_whatever_the_index_draws(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So copies of a shard, and checkpoints, are the same."""
    monkeypatch.undo()
    indices = [RowIndex(RowStorage(4)) for _ in range(2)]
    for index in indices:
        add(index, ONE_SLOT, 1)
        index.remove(np.array(ONE_SLOT[::3], np.int64))
        add(index, LATER, 2)
        index.drop(2)
    for slot in range(SLOTS):
        first, second = (headers_at(each.storage.addresses(slot))[0] for each in indices)
        assert np.array_equal(first, second)
