"""Criteo's format: a label, 13 integers and 26 categories, separated by tabs."""

from __future__ import annotations

from typing import final

import numpy as np
import numpy.typing as npt
import torch

from trireme.compiled import compiled

from .batches import ClickBatch
from .hashing import check_bits, column_state, feature_of, hash_bytes
from .lines import Bytes
from .numerals import real_number
from .reader import Parsed, Paths, RowParser, RowReader

COUNTS, CATEGORIES = 13, 26
REASONS = (
    "",
    "the label is not 0 or 1",
    "it has too few columns: a label, 13 integers and 26 categories, separated by tabs, are wanted",
    "it has more columns than a label, 13 integers and 26 categories",
    "one of the columns 2 to 14 is no number",
)
_NEWLINE, _RETURN, _TAB, _ZERO, _ONE = 10, 13, 9, 48, 49


@final
class CriteoReader(RowReader[ClickBatch]):
    """Reads files of Criteo's click logs (the Kaggle challenge of 2014, and the terabyte).

    A row is a label (0 or 1), 13 integers and 26 categories of 8 hexadecimal digits, separated by
    tabs; any but the label may be missing. A category is hashed with the name of its column, C1 to
    C26: one table holds the rows of all columns.
    """

    def __init__(
        self, paths: Paths, batch_size: int = 1000, *, hash_bits: int = 24, num_shards: int = 16
    ) -> None:
        """Finds the files.

        Args:
            paths: the files, unpacked.
            batch_size: the most rows in a batch.
            hash_bits: categories are hashed to 2^hash_bits features; 63 makes collisions rare.
            num_shards: the number of shards; 1 for a reader whose batches are dealt by position.

        Raises:
            ConfigurationError: a number is out of range, or there is no file.
            DataError: a file cannot be read.
        """
        super().__init__(paths, batch_size, num_shards)
        check_bits(hash_bits)
        self._bits = hash_bits

    def parser(self) -> RowParser[ClickBatch]:
        return CriteoParser(self.batch_size, self._bits)


@final
class CriteoParser(RowParser[ClickBatch]):
    """Parses rows of Criteo's format.

    Args:
        rows: the most rows of a batch.
        bits: categories are hashed to 2^bits features.
    """

    def __init__(self, rows: int, bits: int) -> None:
        self.count = 0
        self._bits = np.uint64(bits)
        names = [f"C{number}" for number in range(1, CATEGORIES + 1)]
        self._states = np.array([column_state(name) for name in names], np.uint64)
        self._labels = np.empty(rows, np.float32)
        self._counts = np.empty((rows, COUNTS), np.float32)
        self._keys = np.empty((rows, CATEGORIES), np.int64)

    def parse(self, data: Bytes, start: int, stop: int, most: int) -> Parsed:
        place, self.count, status = parse_criteo(
            data,
            start,
            stop,
            most,
            self.count,
            self._states,
            self._bits,
            self._labels,
            self._counts,
            self._keys,
        )
        return Parsed(place, REASONS[status])

    def take(self) -> ClickBatch:
        rows, self.count = self.count, 0
        arrays = self._counts, self._keys, self._labels
        return ClickBatch(*(torch.from_numpy(array[:rows].copy()) for array in arrays))


@compiled
def parse_criteo(
    data: Bytes,
    at: int,
    stop: int,
    most: int,
    rows: int,
    states: npt.NDArray[np.uint64],
    bits: np.uint64,
    labels: npt.NDArray[np.float32],
    counts: npt.NDArray[np.float32],
    keys: npt.NDArray[np.int64],
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
            status = _parse_row(data, at, end, states, bits, counts[rows], keys[rows])
            if status:
                return at, rows, status
            labels[rows] = 1.0 if data[at] == _ONE else 0.0
            rows += 1
        at = newline + 1
    return at, rows, 0


@compiled
def _parse_row(
    data: Bytes,
    place: int,
    end: int,
    states: npt.NDArray[np.uint64],
    bits: np.uint64,
    counts: npt.NDArray[np.float32],
    keys: npt.NDArray[np.int64],
) -> int:
    """Parses a line; returns a status."""
    if data[place] != _ZERO and data[place] != _ONE:
        return 1
    place += 1
    if place < end and data[place] != _TAB:
        return 1
    for column in range(COUNTS):
        if place >= end:
            return 2
        place += 1  # over the tab
        value, after = real_number(data, place, end)
        if after < end and data[after] != _TAB:
            return 4
        counts[column] = value if after > place else np.nan
        place = after
    for column in range(CATEGORIES):
        if place >= end:
            return 2
        place += 1
        after = place
        while after < end and data[after] != _TAB:
            after += 1
        keys[column] = feature_of(hash_bytes(states[column], data, place, after), bits)
        place = after
    return 0 if place == end else 3
