"""What a shard knows of the changes of its tables."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba", reason="tables are not tested: pip install 'trireme-train[tables]'")


from trireme.errors import OutOfMemory
from trireme.tables.job import shard_tables as tables
from trireme.tables.job.requests import RowUpdates, encoded
from trireme.tables.job.shard_tables import DROPPED, ShardTables
from trireme.tables.job.table_extension import joined
from trireme.tables.row_storage import RowStorage
from trireme.tables.table_spec import Add, TableSpec

SPEC = TableSpec("t", 1, Add(), "int64", drop_after=4)


def update(made: ShardTables, step: int, *keys: int) -> None:
    rows = np.ones((len(keys), 1), np.int64)
    made.apply(encoded([RowUpdates(0, np.array(keys, np.int64), rows)]), step)


def changes(made: ShardTables, since: int) -> tuple[list[int], list[int]]:
    """The keys with rows that have changed, and those that were dropped."""
    found = joined([made.copy(since)])
    if not found:
        return [], []
    return found["t/keys"].tolist(), found[f"t/{DROPPED}"].tolist()


def test_changes_have_the_keys_that_were_dropped() -> None:
    made = ShardTables([SPEC])
    update(made, 1, 7, 8)
    for step in range(2, 7):
        update(made, step, 9)
    assert changes(made, 2) == ([9], [7, 8])
    assert changes(made, 6) == ([], [])
    assert f"t/{DROPPED}" not in joined([made.copy()])


def test_changes_are_known_after_what_was_asked_for_and_loaded() -> None:
    made = ShardTables([SPEC])
    assert made.changes_after == 0
    for step in range(1, 9):
        update(made, step, step)
    assert changes(made, 3)[1] == [1, 2, 3, 4]
    assert made.changes_after == 3
    made.copy()
    assert made.changes_after == 3
    other = ShardTables([SPEC])
    other.load(made.copy(), 8)
    assert other.changes_after == 8
    update(other, 9, 5)
    assert changes(other, 8) == ([5], [])


def test_so_many_drops_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_DROPS", 10)
    made = ShardTables([SPEC])
    for step in range(1, 40):
        update(made, step, 2 * step, 2 * step + 1)
        assert made.tables[0].remembered_drops <= 12
    after = made.changes_after
    assert 4 < after < 39
    dropped = changes(made, after)[1]
    assert dropped == list(range(2 * (after - 3), 2 * (39 - 4) + 2)), "all that came after"


def test_rows_that_there_is_no_memory_for_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ShardTables([SPEC])
    update(made, 1, 1, 2, 3)

    def refuse(storage: object) -> None:
        raise MemoryError

    monkeypatch.setattr(RowStorage, "_allocate", refuse)
    with pytest.raises(OutOfMemory, match=r"rows of the table 't': it has [\d,]+ here, and takes"):
        for step in range(2, 10_000):
            update(made, step, *range(step * 1000, step * 1000 + 1000))
