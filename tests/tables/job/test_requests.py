"""Updates and wanted keys of tables, divided among shards and put together again."""

from __future__ import annotations

import random

import numpy as np
import pytest

pytest.importorskip("numba", reason="tables are not tested: pip install 'trireme-train[tables]'")

from trireme.errors import FrameError
from trireme.ps.row_messages import Place, RowCodec, RowKeys, RowKeysInto, RowUpdates, data_of, raw
from trireme.ps.table_spec import FTRL, SGD, Add, SparseAdam, TableSpec
from trireme.tables.job.packed_rows import row_bytes
from trireme.tables.job.requests import Parts, keys_of, mismatch, rows_of, slots_of_shard
from trireme.tables.job.shard_tables import ShardTables
from trireme.tables.keys import slots_of

SPECS = (TableSpec("counts", 3, Add(), "int64"), TableSpec("rows", 5, SGD(lr=0.5)))
BOUNDS = [(0, 256), (0, 128, 256), (0, 1, 250, 251, 256), (0, 3, 16)]


def batch(table: int, count: int) -> tuple[RowUpdates, RowKeys]:
    numbers = np.random.default_rng([table, count])
    keys = numbers.permutation(np.arange(count) * 7919 - 1000)
    rows = numbers.integers(0, 99, (count, SPECS[table].width)).astype(SPECS[table].dtype)
    return RowUpdates(table, raw(keys), raw(rows), 0.25 if table else None), RowKeys(
        table, raw(keys)
    )


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize("count", [0, 1, 700])
def test_each_shard_gets_its_rows_and_the_worker_all_answers(
    bounds: tuple[int, ...], count: int
) -> None:
    (first, wanted), (second, _) = batch(0, count), batch(1, count // 2)
    parts, answers, seen = Parts((second, first), (wanted,), SPECS, bounds), [], 0
    expected = dict(zip(keys_of(first.keys).tolist(), rows_of(first.rows, SPECS[0]), strict=True))
    for shard in range(len(bounds) - 1):
        (other, mine), (asked,) = parts.of_shard(shard)
        assert (other.table, mine.table, other.lr) == (1, 0, 0.25)
        keys = keys_of(mine.keys)
        within = slots_of_shard(bounds, shard)
        assert all(within[0] <= slot < within[1] for slot in slots_of(np.array(keys)))
        assert mismatch(SPECS, (other, mine, asked), within) is None
        for key, row in zip(keys.tolist(), rows_of(mine.rows, SPECS[0]), strict=True):
            np.testing.assert_array_equal(row, expected[key])
        np.testing.assert_array_equal(keys_of(asked.keys), keys)
        size = keys.size * 8 * 2 + keys.size * 24 * 2 + keys_of(other.keys).size * (8 + 20)
        assert parts.nbytes(shard) == size
        answers.append((raw(rows_of(mine.rows, SPECS[0])),))
        seen += keys.size
    assert seen == count
    (found,) = parts.united(answers)
    np.testing.assert_array_equal(found, rows_of(first.rows, SPECS[0]))


def test_answers_of_another_size_are_refused() -> None:
    _, wanted = batch(0, 10)
    for bounds in BOUNDS[:2]:
        parts = Parts((), (wanted,), SPECS, bounds)
        for answer in ((), (None,), (bytes(8),)):
            with pytest.raises(FrameError, match="a parameter server answered with"):
                parts.united([answer] * (len(bounds) - 1))


def test_what_makes_no_sense_at_a_shard_is_said() -> None:
    keys, rows = bytes(16), bytes(48)
    for entry, reason in (
        (RowKeys(2, keys), "names table 2, and there are 2"),
        (RowKeys(0, bytes(9)), "end with 1 bytes, and a key has 8"),
        (RowKeys(0, Place(0, 8)), "lie in memory that was not lent"),
        (RowUpdates(0, keys, Place(0, 8)), "lie in memory that was not lent"),
        (RowUpdates(0, keys, rows[1:]), "2 rows of table 'counts' take 48 bytes, and the push has"),
        (RowKeysInto(0, keys, out=memoryview(bytearray(40))), "names 40 bytes for them"),
    ):
        assert reason in str(mismatch(SPECS, (entry,)))
    key = np.array([5])
    slot = int(slots_of(key)[0])
    assert mismatch(SPECS, (RowKeys(0, raw(key)),), (slot, slot + 1)) is None
    elsewhere = mismatch(SPECS, (RowKeys(0, raw(key)),), (slot + 1, 256))
    assert "belong to slots of another shard" in str(elsewhere)
    with pytest.raises(FrameError, match="was not lent over its connection"):
        data_of(Place(0, 8))


@pytest.mark.parametrize(
    ("spec", "lr", "says"),
    [
        (TableSpec("words", 2, SGD(lr=0.1)), -1.0, "SGD.lr is -1.0: it is at least 0"),
        (TableSpec("words", 2, SGD(lr=0.1)), float("nan"), "it is a finite number"),
        (TableSpec("clicks", 2, FTRL(alpha=0.1)), 0.1, "a hyper-parameter of FTRL is 'lr'"),
    ],
)
def test_a_learning_rate_that_makes_no_sense_is_refused_at_the_push(
    spec: TableSpec, lr: float, says: str
) -> None:
    """Else it would be an error in each server, of an update that all have agreed on."""
    rows = raw(np.array([7])), raw(np.ones((1, 2), np.float32))
    assert mismatch([spec], [RowUpdates(0, *rows)]) is None
    assert says in str(mismatch([spec], [RowUpdates(0, *rows, lr)]))


KINDS = (
    TableSpec("counts", 3, Add(), "int64"),
    TableSpec("words", 4, SparseAdam(lr=0.1), admit_after=2, drop_after=8),
    TableSpec("weights", 1, FTRL(alpha=0.1), "float64"),
)
EXTREMES = (0, -1, 7, 2**63 - 1, -(2**63))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numbers that are none
@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_not_refused_is_applied_and_no_key_has_two_rows(seed: int) -> None:
    """Another program of the job's secret may send any bytes, also keys that come twice."""
    draw, tables = random.Random(seed), ShardTables(KINDS)
    codecs: tuple[RowCodec, ...] = ("none", "none", "fp16", "bf16", "int8")
    applied = 0
    for _ in range(300):
        updates = []
        for table in draw.sample((0, 0, 1, 1, 2, 2, 3), draw.choice((1, 1, 2))):
            spec, codec = KINDS[min(table, len(KINDS) - 1)], draw.choice(codecs)
            count = draw.choice((0, 1, 2, 30))
            keys = [draw.choice((*EXTREMES, draw.getrandbits(62))) for _ in range(count)]
            size = count * row_bytes(codec, spec) + (draw.random() < 0.05)
            lr = draw.choice((None, None, None, 0.1, -1.0, float("nan")))
            rows = draw.randbytes(size)
            updates.append(RowUpdates(table, raw(np.array(keys, np.int64)), rows, lr, codec))
        if tables.mismatch(updates) is None:
            applied += 1
            tables.apply(updates, applied)
    assert 20 < applied < 300
    for table in tables.tables:
        keys = np.concatenate([np.zeros(0, np.int64), *(b.keys for b in table.export())]).tolist()
        assert len(keys) == len(set(keys)) >= len(table) > 0
