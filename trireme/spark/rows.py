"""The rows of a DataFrame as a data set: files of Arrow's, which executors write and workers map.

A file `rows.json`, written last, lists the files of a data set: what a task of Spark has written
that failed, or that ran twice, is not in it.
"""

from __future__ import annotations

import os
import uuid
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import accumulate
from operator import index
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.utils.data import Dataset

from trireme.errors import ConfigurationError, DataError
from trireme.files import write_atomically

_LIST = "rows.json"


class Written(msgspec.Struct, frozen=True):
    """The files of a data set, in their order, each with its number of rows."""

    columns: dict[str, str]  # with the types that Spark has for them
    files: list[tuple[str, int]]

    def save(self, directory: Path) -> None:
        write_atomically(directory / _LIST, msgspec.json.encode(self), durable=True)


class Rows(Dataset[dict[str, Any]]):
    """The rows of a DataFrame, by number: each a dictionary of its columns.

    A number is a tensor without dimensions, and an array of numbers one of shape `(n,)`, of the
    column's dtype; other values are what Python has for them. A `None` is refused where a batch
    is made of it.

    Args:
        directory: where they were written.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = os.fspath(directory)
        path = Path(directory, _LIST)
        try:
            written = msgspec.json.decode(path.read_bytes(), type=Written)
        except (OSError, msgspec.DecodeError) as error:
            raise DataError(f"{path} cannot be read, and lists the rows: {error}") from error
        self.columns = written.columns
        self._files = [name for name, _ in written.files]
        self._ends = list(accumulate(count for _, count in written.files))
        self._tables: dict[int, Any] = {}

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.__getitems__([number])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Returns several rows, as loaders ask for them."""
        found: dict[int, dict[str, Any]] = {}
        by_file: dict[int, list[int]] = {}
        numbers = [each + len(self) if each < 0 else each for each in map(index, indices)]
        for number in numbers:
            if not 0 <= number < len(self):
                raise IndexError(f"there is no row {number} of {len(self)} rows")
            by_file.setdefault(bisect_right(self._ends, number), []).append(number)
        for file, wanted in by_file.items():
            begin = self._ends[file] - self._table(file).num_rows
            taken = self._table(file).take([number - begin for number in wanted])
            columns = {name: _values(taken[name]) for name in taken.column_names}
            for place, number in enumerate(wanted):
                found[number] = {name: each[place] for name, each in columns.items()}
        return [found[number] for number in numbers]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tables": {}}  # each process maps the files itself

    def _table(self, number: int) -> Any:
        import pyarrow

        if number not in self._tables:
            path = os.path.join(self.directory, self._files[number])
            try:
                self._tables[number] = pyarrow.ipc.open_file(pyarrow.memory_map(path)).read_all()
            except (OSError, pyarrow.ArrowException) as error:
                raise DataError(
                    f"{path} cannot be read ({error}): all nodes need {self.directory} at this "
                    "path, as on a shared file system"
                ) from error
        return self._tables[number]


def _values(column: Any) -> Any:
    """Returns the values of a column of Arrow's: tensors where they are numbers."""
    from pyarrow import compute, types

    def is_number(kind: Any) -> bool:
        return bool(types.is_floating(kind) or types.is_integer(kind) or types.is_boolean(kind))

    if column.null_count == 0 and is_number(column.type):
        return torch.from_numpy(column.to_numpy().copy())
    if column.null_count == 0 and types.is_list(column.type) and is_number(column.type.value_type):
        numbers = compute.list_flatten(column)
        lengths = compute.list_value_length(column).to_pylist()
        if numbers.null_count == 0:
            return torch.split(torch.from_numpy(numbers.to_numpy().copy()), lengths)
    return column.to_pylist()


def write(frame: Any, directory: Path, say: Callable[[str], object]) -> Rows:
    """Writes a DataFrame into a directory that all nodes have, or finds it there.

    Args:
        frame: the DataFrame; its partitions become files.
        directory: where; rows that are there already stay, and are what is returned.
        say: told where rows were there already.
    """
    if not hasattr(frame, "mapInArrow"):
        raise ConfigurationError(f"a data set is a DataFrame of Spark, or Rows, and not {frame!r}")
    columns = dict(frame.dtypes)
    if len(columns) < len(frame.dtypes):
        raise ConfigurationError(f"two columns have one name: {', '.join(frame.columns)}")
    if vectors := [name for name, kind in columns.items() if kind == "vector"]:
        raise ConfigurationError(
            f"the column {vectors[0]} has vectors of Spark's ML: make arrays of them by "
            "pyspark.ml.functions.vector_to_array"
        )
    if (directory / _LIST).exists():
        rows = Rows(directory)
        if rows.columns != columns:
            raise ConfigurationError(
                f"{directory} has rows with the columns {rows.columns}, and the DataFrame has "
                f"{columns}: name another run_dir, or delete {directory} and the checkpoints of "
                "the rows that were there"
            )
        say(f"trains on the {len(rows):,} rows that were written into {directory} before")
        return rows
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"rows cannot be written into {directory}: {error}") from error
    writing = partial(_write_part, str(directory))
    found = frame.mapInArrow(writing, "part long, file string, rows long").collect()
    files = [(each["file"], each["rows"]) for each in sorted(found, key=lambda each: each["part"])]
    if not files:
        raise ConfigurationError("the DataFrame has no rows: nothing can be trained on")
    if lacking := [name for name, _ in files if not (directory / name).exists()]:
        raise ConfigurationError(
            f"an executor has written {directory / lacking[0]}, which is not there on this host: "
            "name a run_dir on a file system that all nodes share"
        )
    Written(columns, files).save(directory)
    return Rows(directory)


def _write_part(directory: str, batches: Iterator[Any]) -> Iterator[Any]:
    """Writes a partition, on an executor."""
    import pyarrow
    from pyspark import TaskContext

    part = TaskContext.get().partitionId()
    name, rows = f"{part:06d}-{uuid.uuid4().hex[:8]}.arrow", 0
    with ExitStack() as opened:
        writer: Any = None
        for batch in batches:
            if writer is None:
                os.makedirs(directory, exist_ok=True)
                writer = opened.enter_context(
                    pyarrow.ipc.new_file(os.path.join(directory, name), batch.schema)
                )
            writer.write_batch(batch)
            rows += batch.num_rows
    if rows:
        yield pyarrow.RecordBatch.from_pylist([{"part": part, "file": name, "rows": rows}])
