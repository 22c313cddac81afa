"""The digits that ship with scikit-learn: 1,797 handwritten ones, 8x8 grey. No download."""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset

from trireme.errors import DataError

_TEST_EXAMPLES = 359
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
        from sklearn.model_selection import train_test_split
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
    parts = train_test_split(
        range(len(classes)), test_size=_TEST_EXAMPLES, stratify=labels, random_state=seed
    )
    train, test = (TensorDataset(images[part], classes[part]) for part in parts)
    return train, test
