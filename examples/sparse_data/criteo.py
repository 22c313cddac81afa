"""Criteo's format: a label, 13 integers and 26 categories, separated by tabs."""

from __future__ import annotations

from typing import final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from .arrow_parser import ArrowParser
from .batches import ClickBatch
from .hashing import check_bits
from .reader import Paths, RowParser, RowReader

INTEGERS = [f"I{number}" for number in range(1, 14)]
CATEGORIES = [f"C{number}" for number in range(1, 27)]


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
        header = ["label", *INTEGERS, *CATEGORIES]
        return _CriteoParser(header, "label", INTEGERS, CATEGORIES, self._bits, "\t", False)


@final
class _CriteoParser(ArrowParser[ClickBatch]):
    def batch(self, labels: torch.Tensor, numbers: torch.Tensor, keys: torch.Tensor) -> ClickBatch:
        return ClickBatch(numbers, keys, labels)

    def check_labels(self, labels: npt.NDArray[np.float32]) -> None:
        if not np.isin(labels, (0, 1)).all():
            raise pa.ArrowInvalid("the label is not 0 or 1")
