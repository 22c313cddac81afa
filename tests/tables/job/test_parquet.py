"""Tables of checkpoints as Parquet files, read back by pyarrow."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.session.checkpoint.samples import sample, sample_changes, sample_tables, save_changes
from trireme.errors import CheckpointError, ConfigurationError
from trireme.session.checkpoint import save
from trireme.tables.job.parquet import export_tables

FIRST = replace(sample(1), tables=sample_tables({1: 1.0, 2: 2.0, 9: 3.0}, waiting={4: 1}))


def read(path: Path) -> dict[str, list[object]]:
    parquet = pytest.importorskip("pyarrow.parquet")
    found: dict[str, list[object]] = parquet.read_table(path).to_pydict()
    return found


def test_rows_are_written_in_the_order_of_keys(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = save(tmp_path / "run", FIRST)
    (file,) = export_tables(path, tmp_path / "out" / "deep")
    assert file == tmp_path / "out" / "deep" / "t.parquet"
    assert read(file) == {"key": [1, 2, 9], "row": [[1.0, -1.0], [2.0, -2.0], [3.0, -3.0]]}
    assert [each.name for each in file.parent.iterdir()] == ["t.parquet"]


def test_changes_are_in_the_rows_and_state_is_written_on_request(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    changes = sample_changes({2: 5.0, 4: 6.0}, dropped=[9])
    path = save_changes(tmp_path / "run", FIRST, [(2, changes)])
    (file,) = export_tables(path, tmp_path, state=True)
    assert read(file) == {
        "key": [1, 2, 4],
        "row": [[1.0, -1.0], [5.0, -5.0], [6.0, -6.0]],
        "state": [[1.0], [5.0], [6.0]],
        "last_step": [1, 1, 1],
        "touches": [1, 1, 1],
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.int32])
def test_names_dtypes_and_tables_without_state_or_rows(tmp_path: Path, dtype: torch.dtype) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    tables = sample_tables({7: 1.0})
    tables["t/rows"] = tables["t/rows"].to(dtype)
    tables["t/states"] = torch.empty(1, 0, dtype=dtype)
    named = {f"a/b/{key.removeprefix('t/')}": tensor for key, tensor in tables.items()}
    empty = {f"empty/{key.removeprefix('t/')}": t for key, t in sample_tables({}).items()}
    path = save(tmp_path / "run", replace(sample(1), tables={**named, **empty}))
    first, second = export_tables(path, tmp_path / "out", state=True)
    assert first.name == "a%2Fb.parquet"
    assert read(first) == {"key": [7], "row": [[1, -1]], "last_step": [1], "touches": [1]}
    kind = str(parquet.read_schema(first).field("row").type.value_type)
    assert kind == {"float64": "double"}.get(str(dtype)[6:], str(dtype)[6:])
    assert read(second)["key"] == []


def test_what_cannot_be_exported_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "run", sample(1))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow", None)
        with pytest.raises(ConfigurationError, match=r"trireme-train\[parquet\]"):
            export_tables(path, tmp_path / "out")
    pytest.importorskip("pyarrow")
    with pytest.raises(CheckpointError, match="has no sparse tables"):
        export_tables(path, tmp_path / "out")
    tables = save(tmp_path / "tables", FIRST)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="could not be written"):
        export_tables(tables, tmp_path / "file")
    with (tables / "tables.safetensors").open("ab") as file:  # type: ignore[operator]
        file.write(b"more")
    with pytest.raises(CheckpointError, match="is damaged"):
        export_tables(tables, tmp_path / "out")
    assert not (tmp_path / "out").exists()
