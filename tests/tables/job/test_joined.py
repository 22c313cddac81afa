"""The arrays of tables in a snapshot: in the order of keys, and only when they are read."""

from __future__ import annotations

from collections.abc import Mapping
from unittest.mock import patch

import numpy as np
import pytest

pytest.importorskip("numba", reason="tables are not tested: pip install 'trireme-train[tables]'")

import torch

from trireme.ps.extension import Tensors
from trireme.session.checkpoint.streamed import shapes_of
from trireme.tables.job import chain
from trireme.tables.job.shard_tables import tensors_of
from trireme.tables.job.table_extension import joined


def block(keys: list[int], waiting: list[int]) -> Tensors:
    rows = np.array([[10 * key, 10 * key + 1] for key in keys], np.float32).reshape(-1, 2)
    arrays = {
        "keys": np.array(keys, np.int64),
        "rows": rows,
        "states": np.empty((len(keys), 0), np.float32),
        "steps": np.zeros(len(keys), np.int64),
        "touches": np.zeros(len(keys), np.int64),
        **dict.fromkeys(("waiting_keys", "waiting_steps", "waiting_touches"), np.array(waiting)),
    }
    return tensors_of("t", arrays)


def made() -> Mapping[str, torch.Tensor]:
    return joined([block([3, -1], [8]), block([5], [7, 9]), block([2], [1])])


def test_arrays_are_in_the_order_of_their_keys() -> None:
    tables = made()
    assert tables["t/keys"].tolist() == [-1, 2, 3, 5]
    assert tables["t/rows"].tolist() == [[-10, -9], [20, 21], [30, 31], [50, 51]]
    assert tables["t/waiting_keys"].tolist() == [1, 7, 8, 9]
    assert "t/rows" in tables and "t/others" not in tables


def test_shapes_are_those_of_the_arrays_which_are_not_read_for_them() -> None:
    with patch.object(chain.Blocks, "read", side_effect=AssertionError):
        tables = made()
        shapes = shapes_of(tables)
    for name, tensor in tables.items():
        assert (shapes[name].shape, shapes[name].dtype) == (tensor.shape, tensor.dtype)


def test_a_table_without_rows_has_arrays() -> None:
    tables = joined([block([], [1]), block([], [2])])
    assert tables["t/keys"].dtype == torch.int64 and not len(tables["t/rows"])
