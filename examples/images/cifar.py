"""CIFAR-10 in its binary version: 32x32 colour images of ten classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

from trireme.errors import DataError

CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
"""The names of the classes, by label."""

TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILES = ("test_batch.bin",)

_SHAPE = (3, 32, 32)
_RECORD = 1 + 3 * 32 * 32


def load(directory: str | Path) -> tuple[TensorDataset, TensorDataset]:
    """Reads the five training files and the test file in `directory`.

    Each file may hold any number of records, so that a sample of CIFAR-10 is read the same way.

    Returns:
        Training and test set. Images are uint8 of shape (N, 3, 32, 32), red plane first, as in the
        files. They take a quarter of the memory of float32; `augment` converts each
        batch. Labels are int64 of shape (N,).

    Raises:
        DataError: a file is missing, of another format or damaged; names it.
    """
    directory = Path(directory)
    return _read(directory, TRAIN_FILES), _read(directory, TEST_FILES)


def _read(directory: Path, names: Sequence[str]) -> TensorDataset:
    files = [_records(directory / name) for name in names]
    records = torch.from_numpy(np.concatenate(files) if len(files) > 1 else files[0])
    images = records[:, 1:].reshape(-1, *_SHAPE).contiguous()
    return TensorDataset(images, records[:, 0].to(torch.int64))


def _records(path: Path) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    if not path.is_file():
        raise DataError(
            f"{path} is missing. Fetch CIFAR-10 with images.download.cifar10(DIRECTORY), or "
            "unpack cifar-10-binary.tar.gz by hand and name the directory of the .bin files."
        )
    try:
        content = np.fromfile(path, np.uint8)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(content) == 0 or len(content) % _RECORD:
        raise DataError(
            f"{path} has {len(content)} bytes: a CIFAR-10 binary file has one or more records of "
            f"{_RECORD} bytes. It was cut off, or it is the Python version. Get it again."
        )
    records = content.reshape(-1, _RECORD)
    if (worst := int(records[:, 0].max())) >= len(CLASSES):
        where = int(records[:, 0].argmax())
        raise DataError(
            f"{path} has label {worst} in record {where}: CIFAR-10's are 0 to 9. It is another "
            "data set (CIFAR-100 has two label bytes), or damaged."
        )
    return records
