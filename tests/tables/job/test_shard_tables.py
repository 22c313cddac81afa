"""What a shard knows of the changes of its tables."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba", reason="tables are not tested: pip install 'trireme-train[tables]'")


from trireme.errors import OutOfMemory
from trireme.tables.job.requests import RowUpdates, encoded
from trireme.tables.job.shard_tables import ShardTables
from trireme.tables.row_storage import RowStorage
from trireme.tables.table_spec import Add, TableSpec

SPEC = TableSpec("t", 1, Add(), "int64", drop_after=4)


def update(made: ShardTables, step: int, *keys: int) -> None:
    rows = np.ones((len(keys), 1), np.int64)
    made.apply(encoded([RowUpdates(0, np.array(keys, np.int64), rows)]), step)


def test_rows_that_there_is_no_memory_for_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ShardTables([SPEC])
    update(made, 1, 1, 2, 3)

    def refuse(storage: object) -> None:
        raise MemoryError

    monkeypatch.setattr(RowStorage, "_allocate", refuse)
    with pytest.raises(OutOfMemory, match=r"rows of the table 't': it has [\d,]+ here, and takes"):
        for step in range(2, 10_000):
            update(made, step, *range(step * 1000, step * 1000 + 1000))
