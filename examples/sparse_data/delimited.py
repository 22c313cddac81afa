"""CSV files with a header: numbers as they are, categories hashed."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import final

import torch

from trireme.errors import ConfigurationError, DataError

from .arrow_parser import ArrowParser
from .batches import SparseBatch
from .hashing import check_bits, feature
from .reader import Paths, RowParser, RowReader


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
        self._columns = label, numbers, categories
        wanted = [label, *numbers, *categories]
        if twice := {name for name in wanted if wanted.count(name) > 1}:
            raise ConfigurationError(f"the column {min(twice)!r} is named twice")
        if len(wanted) == 1:
            raise ConfigurationError("a CsvReader without features: name categories or numbers")
        self._delimiter, self._bits = delimiter, hash_bits
        self._header, _ = _header(self.paths[0], delimiter)
        if missing := [name for name in wanted if name not in self._header]:
            raise DataError(
                f"{self.paths[0]} has no column {missing[0]!r}: its first line names "
                f"{', '.join(self._header)}"
            )

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
        return _CsvParser(self._header, *self._columns, self._bits, self._delimiter)


@final
class _CsvParser(ArrowParser[SparseBatch]):
    def __init__(
        self,
        header: Sequence[str],
        label: str,
        numbers: Sequence[str],
        categories: Sequence[str],
        bits: int,
        delimiter: str,
    ) -> None:
        super().__init__(header, label, numbers, categories, bits, delimiter, quoted=True)
        self._number_keys = torch.tensor([feature(name, "", bits) for name in numbers]).long()

    def batch(self, labels: torch.Tensor, numbers: torch.Tensor, keys: torch.Tensor) -> SparseBatch:
        features = torch.cat([self._number_keys.expand(len(labels), -1), keys], 1)
        values = torch.cat([numbers, torch.ones(keys.shape)], 1)
        given = ~values.isnan()
        ends = given.sum(1).cumsum(0)
        return SparseBatch(ends - given.sum(1), features[given], values[given], labels)


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
