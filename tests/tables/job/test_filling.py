"""How tables come to a replica that is filled, and to the shards that follow others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba", reason="tables are not tested: pip install 'trireme-train[tables]'")

import torch
from msgspec.structs import replace

from trireme.errors import Rejected
from trireme.ps.extra import Extra
from trireme.tables.job import shard_tables as tables
from trireme.tables.job.requests import RowUpdates, encoded
from trireme.tables.job.shard_tables import ShardTables
from trireme.tables.job.table_extension import joined
from trireme.tables.keys import SLOTS, slots_of
from trireme.tables.table_spec import RowWiseAdagrad, TableSpec, Uniform

OFTEN = TableSpec(
    "often", 3, RowWiseAdagrad(lr=0.1), initializer=Uniform(-1, 1, seed=3), admit_after=2
)
SPECS = (OFTEN, replace(OFTEN, name="seldom", admit_after=1, drop_after=8))
WHOLE, LOWER = (0, SLOTS), (0, SLOTS // 2)


def all_within(keys: Any, slots: tuple[int, int]) -> Any:
    at = slots_of(keys)
    return (at >= slots[0]) & (at < slots[1])


def updates(rng: np.random.Generator, slots: tuple[int, int], lr: float | None) -> Extra:
    made = []
    for table in range(len(SPECS)):
        keys = rng.permutation(2000)[:400]
        keys = keys[all_within(keys, slots)]
        rows = rng.standard_normal((keys.size, 3)).astype(np.float32)
        made.append(RowUpdates(table, keys, rows, lr))
    return encoded(made)


def same(one: ShardTables, other: ShardTables) -> bool:
    return same_tables(joined([one.copy()]), joined([other.copy()]))


def same_tables(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(array, second[name]) for name, array in first.items()
    )


@pytest.mark.parametrize("slots", [WHOLE, LOWER])
def test_a_replica_is_filled_while_the_tables_change(
    slots: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "_PIECE_BYTES", 4000)
    rng = np.random.default_rng(0)
    primary, other = ShardTables(SPECS, slots), ShardTables(SPECS, slots)
    for step in range(1, 4):
        primary.apply(updates(rng, slots, None), step)
    other.resume(None, 3)
    assert other.lacks == slots[1] - slots[0]
    pieces = 0
    for step in range(4, 300):
        said = updates(rng, slots, 0.5 if step == 5 else None)
        primary.apply(said, step)
        other.apply(said, step)
        if other.lacks:
            other.fill(*primary.piece(other.lacks))
            pieces += 1
        if pieces > 10 and not other.lacks:
            break
    assert pieces > 10
    assert not other.lacks
    for later in (step + 1, step + 9):
        said = updates(rng, slots, None)
        primary.apply(said, later)
        other.apply(said, later)
        assert same(primary, other)


def test_pieces_are_of_a_few_slots_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ShardTables(SPECS)
    (start, end), tensors = made.piece(SLOTS)
    assert (start, end, tensors) == (0, 32, [])
    rng = np.random.default_rng(0)
    for step in range(1, 10):  # each slot has some rows then
        made.apply(updates(rng, WHOLE, None), step)
    monkeypatch.setattr(tables, "_PIECE_BYTES", 1)
    assert made.piece(SLOTS - 7)[0] == (7, 8)
    assert made.piece(1)[0] == (SLOTS - 1, SLOTS)


def test_pieces_that_are_not_due_are_refused() -> None:
    primary, other = ShardTables(SPECS), ShardTables(SPECS)
    with pytest.raises(Rejected, match=r"slots \(0, 32\) came where those from 256 were due"):
        other.fill(*primary.piece(SLOTS))
    other.resume(None, 0)
    for lacks in (SLOTS - 1, 1):
        with pytest.raises(Rejected, match="came where those from 0 were due"):
            other.fill(*primary.piece(lacks))
    with pytest.raises(Rejected, match="came where"):
        other.fill((0, 0), ())


def test_tables_that_stay_are_taken_as_they_are() -> None:
    before = ShardTables(SPECS, LOWER)
    before.apply(updates(np.random.default_rng(0), LOWER, 0.5), 3)
    kept = [*before.tables]
    after = ShardTables(SPECS, LOWER)
    after.resume([before], 3)
    assert after.tables == kept
    assert [table.optimizer for table in after.tables] == [spec.optimizer for spec in SPECS]


@pytest.mark.parametrize(
    "bounds",
    [
        ((0, 100), (100, 150), (150, SLOTS)),
        ((0, 150), (150, 250), (250, SLOTS)),
        ((0, 10), (10, 150), (150, SLOTS)),
    ],
)
def test_shards_are_divided_and_put_together_again(bounds: tuple[tuple[int, int], ...]) -> None:
    whole = ShardTables(SPECS)
    rng = np.random.default_rng(0)
    for step in (1, 2):
        whole.apply(updates(rng, WHOLE, None), step)
    before, large = joined([whole.copy()]), whole.tables[1]
    parts = [ShardTables(SPECS, each) for each in bounds]
    for part in parts:
        part.resume([whole], 2)
    assert [part.tables[1] is large for part in parts].count(True) == 1, "the largest is not copied"
    for part in parts:
        for name, array in joined([part.copy()]).items():
            assert not name.endswith("keys") or all_within(array.numpy(), part.slots).all()
    middle = sum(bounds[1]) // 2
    one, other = ShardTables(SPECS, (0, middle)), ShardTables(SPECS, (middle, SLOTS))
    one.resume(parts[:2], 2)
    other.resume(parts[1:], 2)
    united = ShardTables(SPECS)
    united.resume([one, other], 2)
    assert same_tables(joined([united.copy()]), before)
