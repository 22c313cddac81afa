"""What a table refuses, what it keeps when it does, and what it costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.tables.contents import contents
from tests.tables.numbers import keys_with_hashes
from trireme.errors import ConfigurationError, Rejected
from trireme.tables import initializers, keys, row_index, row_storage, row_values
from trireme.tables.keys import slots_of
from trireme.tables.row_optimizers import ROW_OPTIMIZERS
from trireme.tables.table import Table, prepare
from trireme.tables.table_spec import (
    SGD,
    Adagrad,
    Add,
    Constant,
    RowWiseAdagrad,
    TableSpec,
    Uniform,
)

KEYS = np.array([5, -7, 0], np.int64)
UPDATES = np.ones((3, 2), np.float32)


def table_of(**values: Any) -> Table:
    given: dict[str, Any] = {"name": "t", "width": 2, "optimizer": Adagrad(0.1), **values}
    return Table(TableSpec(**given))


def pushed(table: Table, count: int, *, first: int = 0, step: int = 1) -> Table:
    batch = np.arange(first, first + count)
    table.push(batch, np.ones((count, table.spec.width), table.spec.dtype), step=step)
    return table


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"keys": KEYS.astype(np.uint64)}, Rejected, "table 't': keys are of uint64"),
        ({"keys": KEYS.reshape(3, 1)}, Rejected, r"keys are of int64 and of shape \(3, 1\)"),
        ({"keys": KEYS[:2]}, Rejected, r"updates .* \(3, 2\); for 2 keys .* \(2, 2\)"),
        ({"updates": UPDATES.astype(np.float64)}, Rejected, "updates are of float64.* float32"),
        ({"updates": UPDATES.reshape(2, 3)}, Rejected, r"of shape \(2, 3\); for 3 keys"),
        ({"step": 0}, Rejected, "the step is 0; it is from 1"),
        ({"step": 1 << 40}, Rejected, "the step is 1099511627776"),
        ({"hyper": {"rate": 0.1}}, ConfigurationError, "of Adagrad is 'rate'"),
        ({"hyper": {"lr": -0.1}}, ConfigurationError, r"Adagrad.lr is -0.1"),
    ],
    ids=list("abcdefghi"),
)
def test_a_push_that_is_refused_changes_nothing(
    arguments: dict[str, Any], error: type[Exception], says: str
) -> None:
    table = pushed(table_of(), 4)
    before = contents(table)
    given = {"keys": KEYS, "updates": UPDATES, "step": 2, **arguments}
    with pytest.raises(error, match=says):
        table.push(given.pop("keys"), given.pop("updates"), **given)
    assert contents(table) == before
    assert table.optimizer == Adagrad(0.1)


def test_a_push_without_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    table = pushed(table_of(), 4)
    before = contents(table)

    def fail(storage: object) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(row_storage.RowStorage, "_allocate", fail)
    with pytest.raises(MemoryError):
        pushed(table, 1000, step=2)
    assert contents(table) == before


@pytest.mark.parametrize("admit_after", [1, 2])
def test_a_small_table_takes_little(admit_after: int) -> None:
    table = table_of(width=16, optimizer=RowWiseAdagrad(0.1), admit_after=admit_after)
    for step in range(admit_after):
        pushed(table, 10, step=step + 1)
    assert table.statistics.bytes < 250_000
    for step in range(admit_after):
        pushed(table, 10_000, step=step + 1)
    assert table.statistics.bytes < 5 * 10_000 * 91


def test_a_slot_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_index, "MOST_RECORDS", 20)
    table = table_of()
    colliding = np.array(keys_with_hashes((7 << 56) | each for each in range(30)), np.int64)
    with pytest.raises(Rejected, match=r"slot 7 of a table would have 30 keys; .* most 20"):
        table.push(colliding, np.ones((30, 2), np.float32), step=1)
    assert len(table) == 0


def test_a_pull_changes_no_row() -> None:
    table = table_of(initializer=Uniform(-1.0, 1.0, 2))
    assert np.array_equal(table.pull(KEYS), table.pull(KEYS))
    table.push(KEYS[:2], UPDATES[:2], step=1)
    batch = np.array([5, 9, 5, 0, -7])
    before = contents(table)
    rows = table.pull(batch)
    assert np.array_equal(rows[0], rows[2]) and not np.array_equal(rows[0], rows[4])
    assert contents(table) == before


def test_arrays_with_gaps_are_taken() -> None:
    table, wide = table_of(), np.arange(20, dtype=np.float32).reshape(5, 4)
    table.push(np.arange(10)[::2], wide[:, ::2], step=1)
    other = table_of()
    other.push(np.arange(0, 10, 2), np.ascontiguousarray(wide[:, ::2]), step=1)
    assert contents(table) == contents(other)
    assert np.array_equal(table.pull(np.arange(10)[::2]), other.pull(np.arange(0, 10, 2)))


def test_a_batch_that_was_pulled_is_found_again_only_while_its_records_stay() -> None:
    """The addresses of a pull are used by the push of the same keys: never old ones."""
    table = table_of(optimizer=SGD(1.0), drop_after=5)
    pushed(pushed(table, 100), 100, first=100, step=4)
    batch = np.arange(100, 200)
    table.pull(batch)
    assert table.drop_unused(6) == 100  # the others move to where these were
    table.push(batch, np.ones((100, 2), np.float32), step=6)
    assert (table.pull(batch) == -2).all() and len(table) == 100
    table.pull(batch)
    table.remove(range(0, 256, 2))
    table.push(batch, np.ones((100, 2), np.float32), step=7)
    odd = slots_of(batch) % 2 == 1
    assert (table.pull(batch[odd]) == -3).all()
    assert (table.pull(batch[~odd]) == -1).all()


def test_admission_counts_touches_of_several_steps() -> None:
    table = table_of(optimizer=Add(), admit_after=3, initializer=Constant(10.0))
    for step in (1, 2):
        table.push(KEYS, UPDATES, step=step)
        assert (len(table), table.statistics.waiting) == (0, 3)
        assert (table.pull(KEYS) == 10).all()
    table.push(KEYS[:1], UPDATES[:1], step=3)
    assert table.pull(KEYS)[:, 0].tolist() == [11, 10, 10]
    assert (len(table), table.statistics.waiting) == (1, 2)


def test_touches_stay_at_their_largest() -> None:
    table = table_of(optimizer=Add())
    block = next(pushed(table, 1).export())
    table.load(replace(block, touches=np.array([(1 << 24) - 2])))
    for step in (2, 3, (1 << 40) - 1):
        pushed(table, 1, step=step)
    assert contents(table)[1][0][2:] == ((1 << 40) - 1, (1 << 24) - 1)


def test_blocks_are_small() -> None:
    table = pushed(table_of(width=5), 3000)
    size = 24 + 2 * 5 * 4
    blocks = list(table.export(block_bytes=100 * size))
    assert len(blocks) == 30
    assert all(sum(a.nbytes for a in block.arrays.values()) == 100 * size for block in blocks)
    assert next(table.export(block_bytes=1)).keys.size == 1


def test_a_loaded_table_goes_on_with_the_hyper_parameters() -> None:
    table, copy = table_of(), table_of()
    table.push(KEYS, UPDATES, step=1, hyper={"lr": 0.7})
    for block in table.export():
        copy.load(block)
    for each in (table, copy):
        each.push(KEYS, UPDATES, step=2)
    assert contents(table) == contents(copy)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"optimizer": SGD(0.1)}, "whose optimizer is SGD; this one has Adagrad"),
        ({"rows": np.ones((3, 3), np.float32)}, r"rows of a block .*\(3, 3\); .*\(3, 2\)"),
        ({"rows": np.ones((3, 2))}, "rows of a block is of float64"),
        ({"states": np.ones((3, 1), np.float32)}, "states of a block"),
        ({"steps": np.array([1, 2])}, r"steps of a block is of int64 and of shape \(2,\)"),
        ({"touches": np.array([1, 2, -1])}, "touches of a block has numbers below 0"),
        ({"steps": np.array([1, 2, 1 << 40])}, "steps of a block has numbers .* above"),
        ({"keys": np.array([1.0, 2.0, 3.0])}, "keys of a block is of float64"),
        ({"waiting_steps": np.array([1])}, "waiting_steps of a block"),
    ],
    ids=list("abcdefghi"),
)
def test_a_block_of_another_table_is_refused(changes: dict[str, Any], says: str) -> None:
    table = table_of()
    table.push(KEYS, UPDATES, step=1)
    block, before = next(table.export()), contents(table)
    with pytest.raises(Rejected, match=says):
        table.load(replace(block, **changes))
    assert contents(table) == before


def test_the_bytes_of_a_row() -> None:
    spec = TableSpec("t", 16, RowWiseAdagrad(0.1))
    table, count = Table(spec), 1_000_000
    for first in range(0, count, 50_000):
        pushed(table, 50_000, first=first)
    grown = table.statistics.bytes / count
    # A slot wastes half a block of 86 KB on average; the last piece of 32 MiB is not used up.
    assert 84 + 5 <= grown <= 84 + 7 + 11 + 16
    empty = Table(spec).statistics.bytes
    assert empty < 10_000


def received(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array as it may come out of a message: read-only, and at an odd address."""
    odd = np.frombuffer(b"." + array.tobytes(), np.uint8)[1:]
    return odd.view(array.dtype).reshape(array.shape)


@pytest.mark.parametrize(
    "spec",
    [
        TableSpec("t", 3, Adagrad(0.1), "float32", admit_after=2, drop_after=1),
        TableSpec("t", 3, Add(), "int64", Constant(4), admit_after=2, drop_after=1),
    ],
    ids=["float32", "int64"],
)
def test_prepared_kernels_are_all_that_a_table_needs(spec: TableSpec) -> None:
    prepare(spec)
    kernels = [
        value
        for module in (keys, initializers, row_index, row_storage, row_values)
        for value in vars(module).values()
        if hasattr(value, "signatures")
    ]
    kernels.append(ROW_OPTIMIZERS[type(spec.optimizer)].kernel)
    before = [len(kernel.signatures) for kernel in kernels]
    table, copy = Table(spec), Table(spec)
    for step in (1, 2, 3):
        batch, inverse = keys.unique(received(np.array([1, 2, 2, step * 10])))
        sums = keys.sum_rows(np.ones((4, 3), spec.dtype), inverse, batch.size)
        table.push(received(batch), received(sums), step=step)
        assert np.array_equal(table.pull(received(batch)), table.pull(batch))
        keys.split(batch, np.zeros(keys.SLOTS, np.int64), 1)
    table.drop_unused(4)
    for block in table.export():
        names = ("keys", "rows", "states", "steps", "touches", "waiting_keys")
        copy.load(replace(block, **{name: received(getattr(block, name)) for name in names}))
    assert contents(copy) == contents(table)
    copy.remove([int(slot) for slot in keys.slots_of(batch)])
    assert [len(kernel.signatures) for kernel in kernels] == before
