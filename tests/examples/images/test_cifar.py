"""CIFAR-10's binary version: the sample, and small files that are wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from images import cifar

from trireme.errors import DataError


def record(label: int, red: int = 1, green: int = 2, blue: int = 3) -> bytes:
    return bytes([label]) + bytes([red]) * 1024 + bytes([green]) * 1024 + bytes([blue]) * 1024


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Files of one to five training records and two test records."""
    for number in range(1, 6):
        records = [record(number, red=i) for i in range(number)]
        (tmp_path / f"data_batch_{number}.bin").write_bytes(b"".join(records))
    (tmp_path / "test_batch.bin").write_bytes(record(9) + record(0))
    return tmp_path


def test_any_number_of_records(small: Path) -> None:
    train, test = cifar.load(small)
    images, labels = train.tensors
    assert (images.dtype, images.shape) == (torch.uint8, (15, 3, 32, 32))
    assert (labels.dtype, labels.tolist()) == (
        torch.int64,
        [1] + [2] * 2 + [3] * 3 + [4] * 4 + [5] * 5,
    )
    assert images[:, 0, 0, 0].tolist() == [i for number in range(1, 6) for i in range(number)]
    assert images[3, :, 31, 31].tolist() == [0, 2, 3]
    assert test.tensors[1].tolist() == [9, 0]


def test_pixels_lie_row_by_row(small: Path) -> None:
    pixels = np.arange(3072, dtype=np.uint64) % 251
    (small / "test_batch.bin").write_bytes(b"\0" + pixels.astype(np.uint8).tobytes())
    image = cifar.load(small)[1].tensors[0][0]
    assert image[1, 2, 3] == (1024 + 2 * 32 + 3) % 251


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has 0 bytes"),
        (record(1)[:-1], "has 3072 bytes: .* records of 3073 bytes"),
        (record(1) + record(10), "has label 10 in record 1"),
    ],
)
def test_what_is_wrong_is_said(small: Path, content: bytes, message: str) -> None:
    path = small / "data_batch_3.bin"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as raised:
        cifar.load(small)
    assert str(path) in str(raised.value)


def test_a_missing_file_says_what_to_do(small: Path) -> None:
    (small / "test_batch.bin").unlink()
    with pytest.raises(DataError, match=r"test_batch\.bin is missing\. .*download\.cifar10"):
        cifar.load(small)


def test_the_sample(cifar_dir: Path) -> None:
    train, test = cifar.load(cifar_dir)
    assert train.tensors[0].shape == (12_500, 3, 32, 32)
    assert test.tensors[0].shape == (2_500, 3, 32, 32)
    assert train.tensors[1].unique().tolist() == list(range(10))
    names = (cifar_dir / "batches.meta.txt").read_text().split()
    assert tuple(names) == cifar.CLASSES
