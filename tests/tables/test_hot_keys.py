"""The keys that are touched most often are found, a part of the table at a time."""

from __future__ import annotations

import numpy as np
import pytest

from trireme.ps.table_spec import SGD, TableSpec
from trireme.tables.hot_keys import HotKey
from trireme.tables.table import Table

HOT = {7: 40, -3: 30, 1 << 60: 20, 11: 10, 12: 9}


def hot_table(**values: int) -> Table:
    """Returns a table of 5,000 keys that are touched at most twice, and a few others."""
    table = Table(TableSpec("t", 2, SGD(0.1), **values))
    rest = np.arange(1000, 6000)
    for step in range(1, 41):
        keys = np.array([key for key, times in HOT.items() if step <= times])
        keys = np.concatenate([keys, rest]) if step in (1, 2) else keys
        table.push(keys, np.zeros((keys.size, 2), np.float32), step=step)
    return table


@pytest.mark.parametrize("admit_after", [1, 3])
def test_all_rows_at_once(admit_after: int) -> None:
    table = hot_table(admit_after=admit_after)
    assert table.hot_keys() == [HotKey(key, times) for key, times in HOT.items()]


def test_a_part_at_a_time() -> None:
    table = hot_table()
    for _ in range(60):
        found = table.hot_keys(rows=100)
    assert found == [HotKey(key, times) for key, times in HOT.items()]


def test_keys_that_are_gone_are_forgotten() -> None:
    table = hot_table(drop_after=5)
    assert len(table.hot_keys()) == 5
    table.drop_unused(40)
    assert table.hot_keys() == [HotKey(7, 40)]


def test_an_empty_table_has_none() -> None:
    assert Table(TableSpec("t", 2, SGD(0.1))).hot_keys() == []
