"""MNIST: 70,000 handwritten digits, 28x28 grey, and data sets packed the same way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import TensorDataset

from trireme.data import idx
from trireme.errors import DataError

__all__ = ["FILES", "load"]

FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
"""The four files' names, without the `.gz` that they may or may not have."""

_CLASSES = 10


def load(
    directory: str | Path, *, flat: bool = True, validation: int = 5000
) -> tuple[TensorDataset, TensorDataset, TensorDataset]:
    """Reads the four files in `directory`.

    Args:
        directory: the directory of the files, which may be gzipped.
        flat: whether images have the shape (N, 784), instead of (N, 1, 28, 28).
        validation: the number of examples of the validation set, from the beginning of the training
            file.

    Returns:
        Training, validation and test set, 55,000, 5,000 and 10,000 examples, in the files' order.
        Images are float32 in [0, 1]; labels int64 of shape (N,).

    Raises:
        DataError: a file is missing, damaged, or does not fit its sibling.
        ValueError: the training file has no more than `validation` examples.
    """
    directory = Path(directory)
    images, labels = _pair(directory, FILES[0], FILES[1])
    if not 0 <= validation < len(images):
        raise ValueError(
            f"validation is {validation}: the training file has {len(images)} examples"
        )
    train = _dataset(images[validation:], labels[validation:], flat)
    held_out = _dataset(images[:validation], labels[:validation], flat)
    return train, held_out, _dataset(*_pair(directory, FILES[2], FILES[3]), flat)


def _pair(directory: Path, *names: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    image_file, label_file = (_find(directory, name) for name in names)
    images, labels = idx.read(image_file), idx.read(label_file)
    for path, array, rank in ((image_file, images, 3), (label_file, labels, 1)):
        if array.dtype != np.uint8 or array.ndim != rank:
            raise DataError(
                f"{path} holds {array.dtype} of shape {array.shape}: MNIST has uint8 with "
                f"{rank} dimension{'s' if rank > 1 else ''} there. Is it the right file?"
            )
    if len(images) != len(labels):
        raise DataError(
            f"{image_file} holds {len(images)} images and {label_file.name} {len(labels)} labels: "
            "they do not belong together. Get both again."
        )
    if len(labels) and labels.max() >= _CLASSES:
        raise DataError(f"{label_file} holds label {labels.max()}: MNIST's are 0 to 9")
    return images, labels


def _find(directory: Path, name: str) -> Path:
    for candidate in (directory / name, directory / f"{name}.gz"):
        if candidate.is_file():
            return candidate
    raise DataError(
        f"{directory} has neither {name} nor {name}.gz. Fetch MNIST with "
        f"trireme.data.download.mnist({str(directory)!r}), or put the four files there by hand."
    )


def _dataset(images: npt.NDArray[Any], labels: npt.NDArray[Any], flat: bool) -> TensorDataset:
    pixels = torch.from_numpy(images).to(torch.float32).div_(255)
    shaped = pixels.flatten(1) if flat else pixels.unsqueeze(1)
    return TensorDataset(shaped, torch.from_numpy(labels).to(torch.int64))
