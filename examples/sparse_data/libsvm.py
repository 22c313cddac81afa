"""The format of libsvm: `label key:value key:value ...`, one row a line."""

from __future__ import annotations

from typing import final

import numpy as np
import numpy.typing as npt
import torch

from trireme.tables.compiled import compiled

from .batches import SparseBatch
from .hashing import check_bits, feature_of
from .lines import Bytes
from .numerals import real_number, whole_number
from .reader import Parsed, Paths, RowParser, RowReader

_FULL = 1
REASONS = (
    "",
    "",
    "the label is no number",
    "a key is no whole number from 0 to 10^18",
    "a value is no number",
)
_ENTRIES = 64  # of a row, to begin with
_SPACE, _TAB, _RETURN, _NEWLINE, _COLON, _HASH, _Q = 32, 9, 13, 10, 58, 35, 113


@final
class LibsvmReader(RowReader[SparseBatch]):
    """Reads files in the format of libsvm, also called svmlight.

    A row is a label and pairs `key:value`; `key` alone has the value 1. What follows a `#` is a
    comment, empty lines are skipped, and `qid:` is ignored. Keys need no order.
    """

    def __init__(
        self,
        paths: Paths,
        batch_size: int = 1000,
        *,
        num_shards: int = 16,
        hash_bits: int | None = None,
    ) -> None:
        """Finds the files.

        Args:
            paths: the files.
            batch_size: the most rows in a batch.
            num_shards: the number of shards; 1 for a reader whose batches are dealt by position.
            hash_bits: the keys are hashed to 2^hash_bits features; None for keys as they are.

        Raises:
            ConfigurationError: a number is out of range, or there is no file.
            DataError: a file cannot be read.
        """
        super().__init__(paths, batch_size, num_shards)
        if hash_bits is not None:
            check_bits(hash_bits)
        self._bits = hash_bits

    def parser(self) -> RowParser[SparseBatch]:
        return LibsvmParser(self.batch_size, self._bits)


@final
class LibsvmParser(RowParser[SparseBatch]):
    """Parses rows of libsvm.

    Args:
        rows: the most rows of a batch.
        bits: the keys are hashed to 2^bits features; None for keys as they are.
    """

    def __init__(self, rows: int, bits: int | None) -> None:
        self.count = 0
        self._bits = np.uint64(bits or 0)
        self._labels = np.empty(rows, np.float32)
        self._offsets = np.zeros(rows + 1, np.int64)
        self._keys = np.empty(rows * _ENTRIES, np.int64)
        self._values = np.empty(rows * _ENTRIES, np.float32)

    def parse(self, data: Bytes, start: int, stop: int, most: int) -> Parsed:
        while True:
            start, self.count, status = parse_libsvm(
                data,
                start,
                stop,
                most,
                self.count,
                self._bits,
                self._labels,
                self._offsets,
                self._keys,
                self._values,
            )
            if status != _FULL:
                return Parsed(start, REASONS[status])
            self._keys = np.concatenate([self._keys, np.empty_like(self._keys)])
            self._values = np.concatenate([self._values, np.empty_like(self._values)])

    def take(self) -> SparseBatch:
        rows, self.count = self.count, 0
        entries = int(self._offsets[rows])
        return SparseBatch(
            torch.from_numpy(self._offsets[:rows].copy()),
            torch.from_numpy(self._keys[:entries].copy()),
            torch.from_numpy(self._values[:entries].copy()),
            torch.from_numpy(self._labels[:rows].copy()),
        )


@compiled
def parse_libsvm(
    data: Bytes,
    at: int,
    stop: int,
    most: int,
    rows: int,
    bits: np.uint64,
    labels: npt.NDArray[np.float32],
    offsets: npt.NDArray[np.int64],
    keys: npt.NDArray[np.int64],
    values: npt.NDArray[np.float32],
) -> tuple[int, int, int]:
    """Parses lines up to `most` rows.

    Returns:
        The place of the first line that was not parsed, the number of rows, and a status: 0, 1
        where `keys` and `values` are too short for that line, or the index of a reason.
    """
    while at < stop and rows < most:
        place, end = at, at
        while data[end] != _NEWLINE and data[end] != _HASH:
            end += 1
        place = _after_spaces(data, place, end)
        if place < end:
            label, after = real_number(data, place, end)
            if after == place or not _separates(data, after, end):
                return at, rows, 2
            count, status = _parse_pairs(data, after, end, bits, offsets[rows], keys, values)
            if status:
                return at, rows, status
            labels[rows] = label
            rows += 1
            offsets[rows] = count
        while data[end] != _NEWLINE:
            end += 1
        at = end + 1
    return at, rows, 0


@compiled
def _parse_pairs(
    data: Bytes,
    place: int,
    end: int,
    bits: np.uint64,
    count: int,
    keys: npt.NDArray[np.int64],
    values: npt.NDArray[np.float32],
) -> tuple[int, int]:
    """Parses the pairs of a line; returns the number of entries and a status."""
    while True:
        place = _after_spaces(data, place, end)
        if place == end:
            return count, 0
        if place + 4 <= end and data[place] == _Q and data[place + 3] == _COLON:
            place += 4
            while place < end and not _separates(data, place, end):
                place += 1
            continue
        if count == len(keys):
            return count, 1
        key, after = whole_number(data, place, end)
        value = 1.0
        if after == place:
            return count, 3
        if after < end and data[after] == _COLON:
            place = after + 1
            value, after = real_number(data, place, end)
            if after == place or not _separates(data, after, end):
                return count, 4
        elif not _separates(data, after, end):
            return count, 3
        keys[count] = feature_of(np.uint64(key), bits) if bits else key
        values[count] = value
        count += 1
        place = after


@compiled
def _after_spaces(data: Bytes, place: int, end: int) -> int:
    while place < end and _is_space(data[place]):
        place += 1
    return place


@compiled
def _separates(data: Bytes, place: int, end: int) -> bool:
    return place == end or _is_space(data[place])


@compiled
def _is_space(letter: int) -> bool:
    return letter in (_SPACE, _TAB, _RETURN)
