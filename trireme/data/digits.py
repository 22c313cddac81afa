"""The digits that ship with scikit-learn: 1,797 handwritten ones, 8x8 grey. No download."""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset

from trireme.data.split import indices
from trireme.errors import DataError

__all__ = ["load"]

_TEST_SHARE = 0.2
_BRIGHTEST = 16


def load(*, flat: bool = True, seed: int = 0) -> tuple[TensorDataset, TensorDataset]:
    """Reads the digits and splits them, each class evenly.

    Args:
        flat: whether images have the shape (N, 64), instead of (N, 1, 8, 8).
        seed: the seed of the split.

    Returns:
        Training and test set: 1,438 and 359 examples. Images are float32 in [0, 1]; labels int64
        of shape (N,).

    Raises:
        DataError: scikit-learn is not installed; the message says how to install it.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            "the digits come with scikit-learn, which is not installed: "
            "pip install 'scikit-learn>=1.5'"
        ) from error
    pixels, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).to(torch.float32).div_(_BRIGHTEST)
    if not flat:
        images = images.reshape(-1, 1, 8, 8)
    classes = torch.from_numpy(labels).to(torch.int64)
    parts = indices(len(classes), (1 - _TEST_SHARE, _TEST_SHARE), seed=seed, labels=classes)
    train, test = (TensorDataset(images[part], classes[part]) for part in parts)
    return train, test
