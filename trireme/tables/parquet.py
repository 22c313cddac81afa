"""The sparse tables of a checkpoint as Parquet files, for other programs.

Rows are read, merged and written piece by piece, so that a table need not fit into memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from trireme.errors import CheckpointError, ConfigurationError
from trireme.files import make_directory, sync_directory
from trireme.location import Location
from trireme.session.checkpoint.manifest import Manifest, read_manifest, verify_files
from trireme.session.checkpoint.place import place_of_checkpoint
from trireme.session.checkpoint.tensors import each_tensor
from trireme.tables.chain import DROPPED, ROWS, WAITING, Part, check_lengths, merge

_NUMPY_DTYPES = {"F64": "float64", "F32": "float32", "I64": "int64", "I32": "int32"}


class TensorSlices(NamedTuple):
    """A tensor in a file, of which some entries are read at a time.

    Attributes:
        shape: its shape.
        dtype: its dtype.
        read: returns entries [start, stop) of its first dimension.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[int, int], npt.NDArray[Any]]


def slice_tensors(directory: Path, group: str, files: Iterable[str]) -> dict[str, TensorSlices]:
    """Returns the tensors of a group, of which parts are read."""

    def sliced(file: Any, name: str) -> TensorSlices:
        part = file.get_slice(name)
        shape = tuple(part.get_shape())
        empty = np.empty(0, _NUMPY_DTYPES[part.get_dtype()])
        if not all(shape):
            return TensorSlices(shape, empty.dtype, lambda *_: empty.reshape(shape))
        return TensorSlices(shape, empty.dtype, lambda start, stop: part[start:stop].numpy())

    return each_tensor(directory, group, files, sliced)


def export_tables(path: str | Location, output: str | Path, *, state: bool = False) -> list[Path]:
    """Writes each sparse table of a checkpoint as a Parquet file, its rows in the order of keys.

    The columns are `key` (int64) and `row` (a list of the row's numbers).
    """
    _pyarrow()
    output = Path(output)
    place, path = place_of_checkpoint(path)
    with place.fetched(path) as directory:
        manifest = read_manifest(directory)
        verify_files(directory, manifest)
        tables = _parts(directory, manifest)
        if not tables:
            raise CheckpointError(f"{path} has no sparse tables: nothing is exported")
        try:
            make_directory(output)
            return [_export(output, name, parts, state=state) for name, parts in tables.items()]
        except OSError as error:
            raise CheckpointError(f"tables could not be written to {output}: {error}") from error


def _pyarrow() -> tuple[Any, Any]:
    """Returns pyarrow and its module for Parquet."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigurationError(
            f"Parquet files are written by pyarrow, which is not installed here ({error}): "
            "pip install 'trireme-train[parquet]'"
        ) from error
    return pyarrow, pyarrow.parquet


def _parts(directory: Path, manifest: Manifest) -> dict[str, list[_TablePart]]:
    """Returns what each save has of each table, the earliest first."""
    groups = ["tables", *manifest.changes]
    slices = [slice_tensors(directory, group, manifest.files) for group in groups]
    names = {key.rpartition("/")[0] for each in slices for key in each} - {""}
    return {name: [_TablePart(each, name) for each in slices] for name in sorted(names)}


class _TablePart(Part):
    """What one save has of a table, in a file.

    Attributes:
        shapes: of its arrays, by name.
        dtypes: of its arrays, by name, as numpy names them.
    """

    def __init__(self, slices: Mapping[str, TensorSlices], table: str) -> None:
        fields = (*ROWS, *WAITING, DROPPED)
        arrays = {f: slices[f"{table}/{f}"] for f in fields if f"{table}/{f}" in slices}
        self.shapes = {field: array.shape for field, array in arrays.items()}
        self.dtypes = {field: array.dtype for field, array in arrays.items()}
        lengths = {field: shape[0] for field, shape in self.shapes.items()}
        check_lengths(table, lengths)
        super().__init__(lengths, lambda field, start, stop: arrays[field].read(start, stop))


def _export(output: Path, name: str, parts: Sequence[_TablePart], *, state: bool) -> Path:
    pa, parquet = _pyarrow()
    target = output / f"{quote(name, safe=' ')}.parquet"
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    fields = ROWS if state else ROWS[:2]
    columns = {"keys": "key", "rows": "row", "states": "state", "steps": "last_step"}
    schema = []
    for field in fields:
        shapes = [part.shapes[field] for part in parts if part.lengths.get("keys")]
        dtypes = [part.dtypes[field] for part in parts if field in part.dtypes]
        kind = pa.from_numpy_dtype(dtypes[0])
        if field in ("rows", "states"):
            width = max((shape[1] for shape in shapes), default=0)
            if not width and field == "states":
                continue
            kind = pa.list_(kind, width) if width else pa.list_(kind)
        schema.append(pa.field(columns.get(field, field), kind, nullable=False))
    taken = [field for field in fields if columns.get(field, field) in {c.name for c in schema}]
    try:
        with parquet.ParquetWriter(partial, pa.schema(schema)) as writer:
            for arrays in merge(parts, taken):
                found = [
                    pa.FixedSizeListArray.from_arrays(pa.array(array.reshape(-1)), array.shape[1])
                    if array.ndim == 2
                    else pa.array(array)
                    for array in arrays
                ]
                kinds = zip(found, schema, strict=True)
                exact = [array.cast(column.type) for array, column in kinds]
                writer.write_batch(pa.record_batch(exact, schema=pa.schema(schema)))
        os.replace(partial, target)
        sync_directory(output)
    finally:
        partial.unlink(missing_ok=True)
    return target
