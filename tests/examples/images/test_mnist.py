"""MNIST: the real files, and small ones that are wrong."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from images import mnist

from trireme.errors import DataError


def write(path: Path, array: np.ndarray) -> None:
    content = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    content += array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Twelve training and three test examples of 2x2; image i is full of i * 20, its label i."""
    for prefix, count in (("train", 12), ("t10k", 3)):
        numbers = np.arange(count)
        images = np.broadcast_to(numbers[:, None, None] * 20, (count, 2, 2))
        write(tmp_path / f"{prefix}-images-idx3-ubyte.gz", images)
        write(tmp_path / f"{prefix}-labels-idx1-ubyte", numbers % 10)
    return tmp_path


def test_splits_scales_and_shapes(small: Path) -> None:
    train, validation, test = mnist.load(small, validation=4)
    assert [len(part) for part in (train, validation, test)] == [8, 4, 3]
    images, labels = train.tensors
    assert (images.dtype, images.shape) == (torch.float32, (8, 4))
    assert (labels.dtype, labels.tolist()) == (torch.int64, [4, 5, 6, 7, 8, 9, 0, 1])
    assert torch.equal(images[0], torch.full((4,), 80 / 255))
    assert validation.tensors[1].tolist() == [0, 1, 2, 3]
    assert mnist.load(small, flat=False, validation=0)[0].tensors[0].shape == (12, 1, 2, 2)


def test_a_missing_file_says_what_to_do(small: Path) -> None:
    (small / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match=r"neither t10k-labels-idx1-ubyte nor .*download\.mnist"):
        mnist.load(small, validation=1)


def test_files_that_do_not_fit(small: Path) -> None:
    labels = small / "train-labels-idx1-ubyte"
    write(labels, np.zeros(11))
    with pytest.raises(DataError, match=r"holds 12 images and .* 11 labels"):
        mnist.load(small)
    write(labels, np.full(12, 10))
    with pytest.raises(DataError, match="holds label 10"):
        mnist.load(small)
    write(labels, np.zeros((12, 2)))
    with pytest.raises(DataError, match=r"holds uint8 of shape \(12, 2\).* 1 dimension there"):
        mnist.load(small)


def test_too_many_for_validation(small: Path) -> None:
    with pytest.raises(ValueError, match="validation is 5000: the training file has 12"):
        mnist.load(small)


def test_the_real_thing(mnist_dir: Path) -> None:
    train, validation, test = mnist.load(mnist_dir)
    assert [len(part) for part in (train, validation, test)] == [55_000, 5_000, 10_000]
    for part in (train, validation, test):
        images, labels = part.tensors
        assert images.shape == (len(part), 784)
        assert (images.min(), images.max()) == (0, 1)
        assert labels.unique().tolist() == list(range(10))
    assert validation.tensors[1][:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert test.tensors[1][:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    # The mean and deviation that everyone normalizes MNIST with.
    pixels = torch.cat([validation.tensors[0], train.tensors[0]])
    assert pixels.mean().item() == pytest.approx(0.1307, abs=1e-4)
    assert pixels.std().item() == pytest.approx(0.3081, abs=1e-4)
