"""Lines of delimited text, read by Arrow: a label, numbers, and categories, which are hashed."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from pyarrow import csv

from trireme.tables.compiled import compiled

from .hashing import check_bits, column_state, feature_of, hash_bytes
from .lines import NEWLINE, Bytes
from .reader import Parsed, RowParser, Rows

_LINE = 64  # bytes: how much is searched at first for the end of a line


class ArrowParser(RowParser[Rows]):
    """Parses rows of delimited text."""

    def __init__(
        self,
        header: Sequence[str],
        label: str,
        numbers: Sequence[str],
        categories: Sequence[str],
        bits: int,
        delimiter: str,
        quoted: bool,
    ) -> None:
        """Makes a parser with an empty batch.

        Args:
            header: the names of all columns.
            label: the column of the label.
            numbers: the columns of numbers, each of which may be empty in a row.
            categories: the columns that are hashed.
            bits: columns and values are hashed to 2^bits features.
            delimiter: the character between fields.
            quoted: whether fields may be quoted.

        Raises:
            ConfigurationError: `bits` is not between 1 and 63.
        """
        check_bits(bits)
        self._label, self._bits = label, np.uint64(bits)
        self._numbers = list(numbers)
        self._states = {name: column_state(name) for name in categories}
        types = {name: pa.float32() for name in (label, *numbers)}
        types |= dict.fromkeys(categories, pa.binary())
        # One thread, one block: an error is then that of the first bad line, or of none.
        self._reading: dict[str, Any] = {"column_names": list(header), "use_threads": False}
        self._parsing = csv.ParseOptions(
            delimiter=delimiter, quote_char='"' if quoted else False, newlines_in_values=False
        )
        self._converting = csv.ConvertOptions(
            column_types=types, include_columns=list(types), null_values=[""]
        )
        self._begin()

    @abstractmethod
    def batch(self, labels: torch.Tensor, numbers: torch.Tensor, keys: torch.Tensor) -> Rows:
        """Returns a batch of rows.

        Args:
            labels: the labels, float32 of shape (rows,).
            numbers: the numbers, float32 of shape (rows, columns of numbers); NaN for empty fields.
            keys: the features of categories, int64 of shape (rows, columns of categories).
        """

    def parse(self, data: Bytes, start: int, stop: int, most: int) -> Parsed:
        end = _after_lines(data, start, stop, most - self.count)
        try:
            self._keep(data[start:end])
        except pa.ArrowInvalid:
            return self._first_bad(data, start, end)
        return Parsed(end)

    def take(self) -> Rows:
        parts = [torch.from_numpy(np.concatenate(part)) for part in zip(*self._parts, strict=True)]
        self._begin()
        return self.batch(*parts)

    def _begin(self) -> None:
        self.count = 0
        self._parts: list[tuple[npt.NDArray[Any], ...]] = []

    def _first_bad(self, data: Bytes, start: int, end: int) -> Parsed:
        """Keeps the rows before the first line that is none, and says what is wrong with it."""
        while start < end:
            after = _after_lines(data, start, end, 1)
            try:
                self._keep(data[start:after])
            except pa.ArrowInvalid as error:
                return Parsed(start, self._reason(str(error)))
            start = after
        return Parsed(end)

    def _reason(self, error: str) -> str:
        """Returns what Arrow says of a line, without its place, which it cannot know."""
        if found := re.search(r"Expected (\d+) columns, got (\d+)", error):
            return f"it should have {found[1]} columns and has {found[2]}"
        if found := re.match(r"In CSV column #(\d+): ", error):
            return f"column {self._reading['column_names'][int(found[1])]} is no number"
        return error

    def _keep(self, data: Bytes) -> None:
        """Adds rows to the batch; raises `ArrowInvalid`, and adds none, where a line is no row."""
        lines = sum(map(bool, data.tobytes().replace(b"\r", b"").split(b"\n")))
        if not lines:
            return  # Arrow refuses a text without rows
        options = csv.ReadOptions(**self._reading, block_size=max(len(data), 1))
        table = csv.read_csv(pa.py_buffer(data), options, self._parsing, self._converting)
        if table.num_rows != lines:
            raise pa.ArrowInvalid("a field has a line break, or a quotation mark is not closed")
        numbers = np.empty((table.num_rows, len(self._numbers)), np.float32)
        for place, name in enumerate(self._numbers):
            numbers[:, place] = _numbers(table, name)
        labels = _numbers(table, self._label)
        self.check_labels(labels)
        keys = np.empty((table.num_rows, len(self._states)), np.int64)
        for place, (name, state) in enumerate(self._states.items()):
            column = table[name].combine_chunks()
            _, offsets, text = column.buffers()
            bounds = np.frombuffer(offsets, np.int32)[column.offset :]
            _hash_column(state, bounds, np.frombuffer(text, np.uint8), self._bits, keys[:, place])
        self._parts.append((labels, numbers, keys))
        self.count += table.num_rows

    def check_labels(self, labels: npt.NDArray[np.float32]) -> None:
        """Raises `ArrowInvalid` where one of the labels is none."""
        if np.isnan(labels).any():
            raise pa.ArrowInvalid("the label is empty")


def _numbers(table: pa.Table, name: str) -> npt.NDArray[np.float32]:
    """Returns a column of numbers, NaN for empty fields."""
    column = table[name].combine_chunks()
    values: npt.NDArray[np.float32] = column.to_numpy(zero_copy_only=False)
    if np.isfinite(values).sum() + column.null_count != len(values):
        raise pa.ArrowInvalid(f"column {name} is no finite number")
    return values


def _after_lines(data: Bytes, start: int, stop: int, most: int) -> int:
    """Returns the place after so many lines of data[start:stop], or after all there are."""
    size = most * _LINE
    while True:
        found = np.flatnonzero(data[start : min(start + size, stop)] == NEWLINE)
        if len(found) >= most:
            return start + int(found[most - 1]) + 1
        if start + size >= stop:
            return stop
        size *= 2


@compiled
def _hash_column(
    state: np.uint64,
    bounds: npt.NDArray[np.int32],
    text: Bytes,
    bits: np.uint64,
    keys: npt.NDArray[np.int64],
) -> None:
    """Writes the features of a column: field n is text[bounds[n]:bounds[n + 1]]."""
    for row in range(len(keys)):
        keys[row] = feature_of(hash_bytes(state, text, bounds[row], bounds[row + 1]), bits)
