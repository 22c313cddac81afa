"""Rows of libsvm: numbers, comments, hashed keys, and lines that are no rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("numba")
pytest.importorskip("pyarrow")

from sparse_data import LibsvmReader
from sparse_data.hashing import feature_of

from tests.examples.sparse_data.rows import rows_of, written
from trireme.errors import ConfigurationError, DataError
from trireme.session.model.batch import examples_in


@pytest.mark.thorough
def test_rows(tmp_path: Path) -> None:
    text = "+1 3:0.5 7:-2e1 # comment 1:1\n\n# all comment\n-1\n0.5\t12 qid:9 13:.25\r\n1 0:1"
    reader = LibsvmReader(written(tmp_path / "rows", text))
    assert rows_of(reader) == [
        (1.0, [(3, 0.5), (7, -20.0)]),
        (-1.0, []),
        (0.5, [(12, 1.0), (13, 0.25)]),
        (1.0, [(0, 1.0)]),
    ]
    (batch,) = reader
    assert examples_in(batch) == 4, "a session counts rows, not entries"
    types = [str(tensor.dtype) for tensor in batch]
    assert types == ["torch.int64", "torch.int64", "torch.float32", "torch.float32"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.one_of(
            st.floats(allow_nan=False, allow_infinity=False).map(repr),
            st.decimals(allow_nan=False, allow_infinity=False).map(str),
            st.integers(-(10**30), 10**30).map(str),
        ),
        min_size=1,
    )
)
def test_numbers_are_pythons(tmp_path: Path, numbers: list[str]) -> None:
    numbers = [text for text in numbers if np.isfinite(float(text))]
    path = written(tmp_path / "rows", "1 " + " ".join(f"0:{text}" for text in numbers))
    ((_, pairs),) = rows_of(LibsvmReader(path))
    with np.errstate(over="ignore"):
        wanted = np.array([float(text) for text in numbers]).astype(np.float32)
    found = np.array([value for _, value in pairs], np.float32)
    np.testing.assert_allclose(found, wanted, rtol=1.2e-7, atol=2e-45)


def test_keys_are_hashed(tmp_path: Path) -> None:
    path = written(tmp_path / "rows", "1 3 999999999999999999\n")
    ((_, pairs),) = rows_of(LibsvmReader(path, hash_bits=10))
    wanted = [feature_of(np.uint64(key), np.uint64(10)) for key in (3, 999999999999999999)]
    assert [key for key, _ in pairs] == wanted
    assert all(0 <= key < 1024 for key in wanted)


def test_long_rows_make_room(tmp_path: Path) -> None:
    path = written(tmp_path / "rows", "1 2:3\n1 " + " ".join(f"{k}:{k}" for k in range(1000)))
    first, second = rows_of(LibsvmReader(path, batch_size=2))
    assert first == (1.0, [(2, 3.0)])
    assert second == (1.0, [(k, float(k)) for k in range(1000)])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("one 1:1", "the label is no number"),
        ("1x 1:1", "the label is no number"),
        ("1 a:1", "a key is no whole number"),
        ("1 -1:1", "a key is no whole number"),
        ("1 1234567890123456789:1", "a key is no whole number"),
        ("1 2,3", "a key is no whole number"),
        ("1 2:", "a value is no number"),
        ("1 2:nan", "a value is no number"),
        ("1 2:1e999", "a value is no number"),
        ("1 2:3x", "a value is no number"),
    ],
)
def test_a_line_that_is_no_row(tmp_path: Path, line: str, reason: str) -> None:
    path = written(tmp_path / "rows", f"1 1:1\n0 1:1\n{line}\n1 2:2\n")
    with pytest.raises(DataError, match=rf"rows, line 3: {reason}.*: '{line}'"):
        list(LibsvmReader(path, batch_size=2))
    batches = iter(LibsvmReader(path, batch_size=2))
    assert len(next(batches).labels) == 2, "rows before the line are read"


def test_numbers_out_of_range(tmp_path: Path) -> None:
    path = written(tmp_path / "rows", "1\n")
    with pytest.raises(ConfigurationError, match="batch_size=0, num_shards=1: both start at 1"):
        LibsvmReader(path, 0, num_shards=1)
    with pytest.raises(ConfigurationError, match="a LibsvmReader of no files"):
        LibsvmReader([])
    with pytest.raises(ConfigurationError, match="bits=64"):
        LibsvmReader(path, hash_bits=64)
    with pytest.raises(DataError, match="nothing cannot be read"):
        LibsvmReader(tmp_path / "nothing")
