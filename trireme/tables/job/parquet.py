"""The sparse tables of a checkpoint as Parquet files, for other programs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch

from trireme.errors import CheckpointError, ConfigurationError
from trireme.files import make_directory, sync_directory
from trireme.location import Location
from trireme.session.checkpoint import load

_COLUMNS = {"keys": "key", "rows": "row"}
_STATE = {"states": "state", "steps": "last_step", "touches": "touches"}


def export_tables(path: str | Location, output: str | Path, *, state: bool = False) -> list[Path]:
    """Writes each sparse table of a checkpoint as a Parquet file, its rows in the order of keys."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigurationError(
            f"Parquet files are written by pyarrow, which is not installed here ({error}): "
            "pip install 'trireme-train[parquet]'"
        ) from error
    tables, output = load(path, streamed=True).tables, Path(output)
    names = sorted({key.rpartition("/")[0] for key in tables})
    if not names:
        raise CheckpointError(f"{path} has no sparse tables: nothing is exported")
    columns = {**_COLUMNS, **_STATE} if state else _COLUMNS
    written = []
    try:
        make_directory(output)
        for name in names:
            target = output / f"{quote(name, safe=' ')}.parquet"
            partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
            try:
                pyarrow.parquet.write_table(_table(pyarrow, tables, name, columns), partial)
                os.replace(partial, target)
            finally:
                partial.unlink(missing_ok=True)
            written.append(target)
        sync_directory(output)
    except OSError as error:
        raise CheckpointError(f"tables could not be written to {output}: {error}") from error
    return written


def _table(
    pa: Any, tables: Mapping[str, torch.Tensor], name: str, columns: Mapping[str, str]
) -> Any:
    """Returns a table of pyarrow; an optimizer without a state has no column for it."""
    arrays = {}
    for field, column in columns.items():
        array = tables[f"{name}/{field}"].numpy()
        if array.ndim == 1:
            arrays[column] = pa.array(array)
        elif array.shape[1]:
            flat = pa.array(array.reshape(-1))
            arrays[column] = pa.FixedSizeListArray.from_arrays(flat, array.shape[1])
        elif field == "rows":
            arrays[column] = pa.array([], pa.list_(pa.from_numpy_dtype(array.dtype)))
    return pa.table(arrays)
