"""CSV files with a header: numbers as they are, categories hashed."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import final

import numpy as np
import numpy.typing as npt
import torch

from trireme.compiled import compiled
from trireme.errors import ConfigurationError, DataError

from .batches import SparseBatch
from .hashing import check_bits, column_state, feature_of, hash_bytes
from .lines import Bytes
from .numerals import real_number
from .reader import Parsed, Paths, RowParser, RowReader

REASONS = (
    "",
    "the label is no number",
    "it has fewer columns than the header",
    "it has more columns than the header",
    "a column of numbers has something else",
    "a quotation mark is not closed in this line, or something follows it",
)
_IGNORED, _LABEL, _NUMBER, _CATEGORY = range(4)
_NEWLINE, _RETURN, _QUOTE = 10, 13, 34


@final
class CsvReader(RowReader[SparseBatch]):
    """Reads CSV files whose first line names the columns.

    A column of numbers gives an entry with the feature of (column, "") and the number as value;
    none where the field is empty. A column of categories gives an entry with the feature of
    (column, field) and the value 1; an empty field is a category too. Fields may be quoted as RFC
    4180 says, but must not contain line breaks: shards begin at any line.
    """

    def __init__(
        self,
        paths: Paths,
        batch_size: int = 1000,
        *,
        label: str,
        categories: Sequence[str] = (),
        numbers: Sequence[str] = (),
        hash_bits: int = 24,
        delimiter: str = ",",
        num_shards: int = 16,
    ) -> None:
        """Finds the files and reads the first one's header.

        Args:
            paths: the files, all with the same header.
            batch_size: the most rows in a batch.
            label: the column of the label, a number.
            categories: the columns that are hashed.
            numbers: the columns of numbers.
            hash_bits: columns and values are hashed to 2^hash_bits features.
            delimiter: the one character between fields, of ASCII.
            num_shards: the number of shards; 1 for a reader whose batches are dealt by position.

        Raises:
            ConfigurationError: a number is out of range, a column is named twice, or there is no
                file.
            DataError: a file cannot be read, or has no such column.
        """
        super().__init__(paths, batch_size, num_shards)
        check_bits(hash_bits)
        if len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n':
            raise ConfigurationError(f"delimiter={delimiter!r}: it is one character, and no quote")
        self._wanted = [label, *numbers, *categories]
        if twice := {name for name in self._wanted if self._wanted.count(name) > 1}:
            raise ConfigurationError(f"the column {min(twice)!r} is named twice")
        if len(self._wanted) == 1:
            raise ConfigurationError("a CsvReader without features: name categories or numbers")
        self._delimiter, self._bits = delimiter, hash_bits
        self._header, _ = _header(self.paths[0], delimiter)
        if missing := [name for name in self._wanted if name not in self._header]:
            raise DataError(
                f"{self.paths[0]} has no column {missing[0]!r}: its first line names "
                f"{', '.join(self._header)}"
            )
        kinds = {label: _LABEL} | dict.fromkeys(numbers, _NUMBER)
        kinds |= dict.fromkeys(categories, _CATEGORY)
        self._kinds = np.array([kinds.get(name, _IGNORED) for name in self._header], np.int64)

    def check_head(self, path: Path) -> int:
        """Returns the length of the header.

        Raises:
            DataError: it is not the first file's.
        """
        header, length = _header(path, self._delimiter)
        if header != self._header:
            raise DataError(
                f"{path} has the columns {', '.join(header)}, and {self.paths[0]} has "
                f"{', '.join(self._header)}: all files of a reader have the same"
            )
        return length

    def parser(self) -> RowParser[SparseBatch]:
        return CsvParser(self.batch_size, self._header, self._kinds, self._delimiter, self._bits)


@final
class CsvParser(RowParser[SparseBatch]):
    """Parses rows of CSV.

    Args:
        rows: the most rows of a batch.
        header: the names of the columns.
        kinds: what each of them is.
        delimiter: the character between fields.
        bits: columns and values are hashed to 2^bits features.
    """

    def __init__(
        self,
        rows: int,
        header: Sequence[str],
        kinds: npt.NDArray[np.int64],
        delimiter: str,
        bits: int,
    ) -> None:
        self.count = 0
        self._kinds, self._delimiter, self._bits = kinds, ord(delimiter), np.uint64(bits)
        self._states = np.array([column_state(name) for name in header], np.uint64)
        entries = rows * int((kinds >= _NUMBER).sum())
        self._labels = np.empty(rows, np.float32)
        self._offsets = np.zeros(rows + 1, np.int64)
        self._keys = np.empty(entries, np.int64)
        self._values = np.empty(entries, np.float32)

    def parse(self, data: Bytes, start: int, stop: int, most: int) -> Parsed:
        place, self.count, status = parse_csv(
            data,
            start,
            stop,
            most,
            self.count,
            self._delimiter,
            self._kinds,
            self._states,
            self._bits,
            self._labels,
            self._offsets,
            self._keys,
            self._values,
        )
        return Parsed(place, REASONS[status])

    def take(self) -> SparseBatch:
        rows, self.count = self.count, 0
        entries = int(self._offsets[rows])
        return SparseBatch(
            torch.from_numpy(self._offsets[:rows].copy()),
            torch.from_numpy(self._keys[:entries].copy()),
            torch.from_numpy(self._values[:entries].copy()),
            torch.from_numpy(self._labels[:rows].copy()),
        )


def _header(path: Path, delimiter: str) -> tuple[list[str], int]:
    """Returns the names of a file's columns, and the length of its first line in bytes."""
    try:
        with path.open("rb") as file:
            line = file.readline()
        text = line.decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: its first line, the names of columns, is not UTF-8") from error
    names = next(csv.reader([text.rstrip("\r\n")], delimiter=delimiter), [])
    if len(set(names)) != len(names):
        raise DataError(f"{path}: its first line names a column twice: {', '.join(names)}")
    return names, len(line)


@compiled
def parse_csv(
    data: Bytes,
    at: int,
    stop: int,
    most: int,
    rows: int,
    delimiter: int,
    kinds: npt.NDArray[np.int64],
    states: npt.NDArray[np.uint64],
    bits: np.uint64,
    labels: npt.NDArray[np.float32],
    offsets: npt.NDArray[np.int64],
    keys: npt.NDArray[np.int64],
    values: npt.NDArray[np.float32],
) -> tuple[int, int, int]:
    """Parses lines up to `most` rows.

    Returns:
        The place of the first line that was not parsed, the number of rows, and a status: 0, or
        the index of a reason.
    """
    while at < stop and rows < most:
        newline = at
        while data[newline] != _NEWLINE:
            newline += 1
        end = newline - 1 if newline > at and data[newline - 1] == _RETURN else newline
        if end > at:
            count, label, status = _parse_row(
                data, at, end, delimiter, kinds, states, bits, offsets[rows], keys, values
            )
            if status:
                return at, rows, status
            labels[rows] = label
            rows += 1
            offsets[rows] = count
        at = newline + 1
    return at, rows, 0


@compiled
def _parse_row(
    data: Bytes,
    place: int,
    end: int,
    delimiter: int,
    kinds: npt.NDArray[np.int64],
    states: npt.NDArray[np.uint64],
    bits: np.uint64,
    count: int,
    keys: npt.NDArray[np.int64],
    values: npt.NDArray[np.float32],
) -> tuple[int, float, int]:
    """Parses a line; returns the number of entries, the label and a status."""
    label = 0.0
    for column in range(len(kinds)):
        if place > end:
            return count, label, 2
        kind, state, value, empty = kinds[column], states[column], 1.0, False
        if kind in (_LABEL, _NUMBER):
            value, after, empty = _number_field(data, place, end)
            if not _ends(data, after, end, delimiter) or (empty and kind == _LABEL):
                return count, label, 1 if kind == _LABEL else 4
        else:
            state, after = _hash_field(data, place, end, delimiter, state)
            if not _ends(data, after, end, delimiter):
                return count, label, 5
        if kind == _LABEL:
            label = value
        elif kind != _IGNORED and not empty:
            keys[count] = feature_of(state, bits)
            values[count] = value
            count += 1
        place = after + 1  # over the delimiter
    return count, label, 0 if place > end else 3


@compiled
def _ends(data: Bytes, place: int, end: int, delimiter: int) -> bool:
    """Returns whether a field ends at a place, which is -1 for one without an end."""
    return place == end or (place >= 0 and data[place] == delimiter)


@compiled
def _number_field(data: Bytes, place: int, end: int) -> tuple[float, int, bool]:
    """Parses a field of a number: the number, where the field ends, and whether it is empty."""
    quoted = place < end and data[place] == _QUOTE
    begin = place + 1 if quoted else place
    value, after = real_number(data, begin, end)
    empty = after == begin
    if quoted:
        closed = after < end and data[after] == _QUOTE
        after = after + 1 if closed else -1
    return value, after, empty


@compiled
def _hash_field(
    data: Bytes, place: int, end: int, delimiter: int, state: np.uint64
) -> tuple[np.uint64, int]:
    """Hashes a field; returns the state and where the field ends, -1 for a quote without an end."""
    if place == end or data[place] != _QUOTE:
        after = place
        while after < end and data[after] != delimiter:
            after += 1
        return hash_bytes(state, data, place, after), after
    place += 1
    while place < end:
        if data[place] == _QUOTE:
            if place + 1 == end or data[place + 1] != _QUOTE:
                return state, place + 1
            place += 1  # a quotation mark within quotes is doubled
        state = hash_bytes(state, data, place, place + 1)
        place += 1
    return state, -1
