"""The arrays of a table in a snapshot: in the order of keys, and only when they are read."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import torch

from trireme.ps.joined_table import JoinedTable
from trireme.session.checkpoint.parts import streamed_tables
from trireme.session.checkpoint.streamed import StreamedTensors, shapes_of

ORDERS = {"keys": "keys", "rows": "keys", "waiting": "waiting"}


def block(keys: list[int], waiting: list[int]) -> dict[str, np.ndarray[tuple[int, ...], object]]:
    rows = np.array([[10 * key, 10 * key + 1] for key in keys], np.float32).reshape(-1, 2)
    return {"keys": np.array(keys, np.int64), "rows": rows, "waiting": np.array(waiting, np.int64)}


def made() -> JoinedTable:
    more = {"dropped": torch.tensor([4])}
    return JoinedTable([block([3, -1], [8]), block([], [7, 9]), block([2], [])], ORDERS, more)


def test_arrays_are_in_the_order_of_their_keys() -> None:
    table = made()
    assert list(table) == ["keys", "rows", "waiting", "dropped"]
    assert table["keys"].tolist() == [-1, 2, 3]
    assert table["rows"].tolist() == [[-10, -9], [20, 21], [30, 31]]
    assert table["waiting"].tolist() == [7, 8, 9]
    assert table["dropped"].tolist() == [4]
    assert "rows" in table
    assert "states" not in table


def test_shapes_are_those_of_the_arrays() -> None:
    table = made()
    for name, tensor in table.items():
        assert table.shapes[name].shape == tensor.shape
        assert table.shapes[name].dtype == tensor.dtype


def test_a_table_without_rows_has_arrays() -> None:
    table = JoinedTable([block([], []), block([], [])], ORDERS, {})
    assert table["rows"].shape == table.shapes["rows"].shape == (0, 2)
    assert table["keys"].dtype == torch.int64


def test_a_checkpoint_reads_no_array_before_it_is_written() -> None:
    with patch.object(JoinedTable, "__getitem__", side_effect=AssertionError):
        tensors = streamed_tables({"t": made(), "u": {"keys": torch.tensor([5])}})
        assert list(tensors) == ["t/keys", "t/rows", "t/waiting", "t/dropped", "u/keys"]
        assert shapes_of(tensors)["t/rows"].nbytes == 24
    assert isinstance(tensors, StreamedTensors)
    assert tensors["t/rows"].tolist() == [[-10, -9], [20, 21], [30, 31]]
    assert tensors["u/keys"].tolist() == [5]
