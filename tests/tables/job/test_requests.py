"""Updates and wanted keys of tables, divided among shards and put together again."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest

pytest.importorskip("numba", reason="tables are not tested: pip install 'trireme-train[tables]'")

from trireme.errors import ConfigurationError, FrameError, Rejected
from trireme.ps.extra import Extra
from trireme.tables.job.requests import (
    RowKeys,
    RowRequest,
    RowUpdates,
    decoded,
    encoded,
    raw,
    slots_of_shard,
)
from trireme.tables.job.shard_tables import ShardTables
from trireme.tables.keys import slots_of
from trireme.tables.table_spec import FTRL, SGD, Add, SparseAdam, TableSpec

SPECS = (TableSpec("counts", 3, Add(), "int64"), TableSpec("rows", 5, SGD(lr=0.5)))
BOUNDS = [(0, 256), (0, 128, 256), (0, 1, 250, 251, 256), (0, 3, 16)]


def batch(table: int, count: int) -> tuple[RowUpdates, RowKeys]:
    numbers = np.random.default_rng([table, count])
    keys = numbers.permutation(np.arange(count) * 7919 - 1000)
    rows = numbers.integers(0, 99, (count, SPECS[table].width)).astype(SPECS[table].dtype)
    return RowUpdates(table, keys, rows, 0.25 if table else None), RowKeys(table, keys)


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize("count", [0, 1, 700])
def test_each_shard_gets_its_rows_and_the_worker_all_answers(
    bounds: tuple[int, ...], count: int
) -> None:
    (first, wanted), (second, _) = batch(0, count), batch(1, count // 2)
    parts = RowRequest(SPECS, (second, first), (wanted,)).divided(bounds)
    expected, answers, seen = dict(zip(first.keys.tolist(), first.rows, strict=True)), [], 0
    for shard in range(len(bounds) - 1):
        extra = parts.of_shard(shard)
        (other, mine), (asked,) = decoded(extra, SPECS)
        assert (other.table, mine.table, other.lr) == (1, 0, 0.25)
        within = slots_of_shard(bounds, shard)
        assert all(within[0] <= slot < within[1] for slot in slots_of(np.array(mine.keys)))
        assert ShardTables(SPECS, within).mismatch(extra) is None
        for key, row in zip(mine.keys.tolist(), mine.rows, strict=True):
            np.testing.assert_array_equal(row, expected[key])
        np.testing.assert_array_equal(asked.keys, mine.keys)
        size = mine.keys.size * 8 * 2 + mine.keys.size * 24 * 2 + other.keys.size * (8 + 20)
        assert parts.nbytes(shard) == size
        answers.append((raw(mine.rows),))
        seen += mine.keys.size
    assert seen == count
    (found,) = parts.united(answers)
    np.testing.assert_array_equal(found, first.rows)


def test_answers_of_another_size_are_refused() -> None:
    _, wanted = batch(0, 10)
    for bounds in BOUNDS[:2]:
        parts = RowRequest(SPECS, wanted=(wanted,)).divided(bounds)
        answers: tuple[Extra, ...] = ((), (b"",), (bytes(8),))
        for answer in answers:
            with pytest.raises(FrameError, match="a parameter server answered with"):
                parts.united([answer] * (len(bounds) - 1))


def test_rows_that_do_not_fit_into_a_message_are_refused() -> None:
    wide = (TableSpec("wide", 1 << 20, Add()),)
    assert RowRequest(wide, wanted=(RowKeys(0, np.arange(2)),)).divided((0, 256))
    with pytest.raises(ConfigurationError, match=r"take 400 MiB at one server.*a smaller batch"):
        RowRequest(wide, wanted=(RowKeys(0, np.arange(100)),)).divided((0, 256))


def test_what_makes_no_sense_is_said() -> None:
    keys, rows = np.arange(2), np.zeros((2, 3), np.int64)
    update = RowUpdates(0, keys, rows)
    header, *arrays = encoded((update,), (RowKeys(1, keys),))
    for extra, reason in (
        (encoded((), (RowKeys(2, keys),)), "a table that is not among the 2 there are"),
        ((header, bytes(9), *arrays[1:]), "take 9 bytes, and a key has 8"),
        ((header, arrays[0], bytes(47), arrays[2]), "table 'counts' take 48 bytes, and the push"),
        ((header, *arrays[:2]), "arrays that it has not"),
        (encoded((update, update)), "names a table twice"),
        ((b"", *arrays), "is malformed"),
    ):
        with pytest.raises(Rejected, match=reason):
            decoded(extra, SPECS)
        assert reason in str(ShardTables(SPECS).mismatch(extra))
    key = np.array([5])
    slot, request = int(slots_of(key)[0]), encoded((), (RowKeys(0, key),))
    assert ShardTables(SPECS, (slot, slot + 1)).mismatch(request) is None
    elsewhere = ShardTables(SPECS, (slot + 1, 256)).mismatch(request)
    assert "belong to slots of another shard" in str(elsewhere)


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
    tables, update = ShardTables([spec]), RowUpdates(0, np.array([7]), np.ones((1, 2), np.float32))
    assert tables.mismatch(encoded((update,))) is None
    assert says in str(tables.mismatch(encoded((RowUpdates(0, update.keys, update.rows, lr),))))


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
    applied = 0
    for _ in range(500):
        named, arrays = draw.sample((0, 0, 1, 1, 2, 2, 3), draw.choice((1, 1, 2))), []
        rates = [draw.choice((None, None, None, 0.1, -1.0, float("nan"))) for _ in named]
        for table in named:
            spec = KINDS[min(table, len(KINDS) - 1)]
            keys = [
                draw.choice((*EXTREMES, draw.getrandbits(62)))
                for _ in range(draw.choice((0, 1, 2, 30)))
            ]
            size = len(keys) * spec.width * spec.item_size + (draw.random() < 0.05)
            arrays += [raw(np.array(keys, np.int64)), draw.randbytes(size)]
        header = msgspec.msgpack.encode((list(zip(named, rates, strict=True)), []))
        if tables.mismatch((header, *arrays)) is None:
            applied += 1
            tables.apply((header, *arrays), applied)
    assert 20 < applied < 500
    for table in tables.tables:
        keys = np.concatenate([np.zeros(0, np.int64), *(b.keys for b in table.export())]).tolist()
        assert len(keys) == len(set(keys)) >= len(table)
    assert any(map(len, tables.tables))
