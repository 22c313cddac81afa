"""The digits that ship with scikit-learn."""

from __future__ import annotations

import sys

import pytest
import torch

from trireme.data import digits
from trireme.errors import DataError


def test_every_digit_is_in_one_of_two_even_parts() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    train, test = digits.load()
    assert (len(train), len(test)) == (1438, 359)
    images = torch.cat([train.tensors[0], test.tensors[0]])
    labels = torch.cat([train.tensors[1], test.tensors[1]])
    assert (images.dtype, images.shape, images.min(), images.max()) == (
        torch.float32,
        (1797, 64),
        0,
        1,
    )
    assert labels.dtype == torch.int64

    def rows(pixels: torch.Tensor, classes: torch.Tensor) -> list[list[float]]:
        return sorted(torch.cat([pixels, classes[:, None]], 1).tolist())

    pixels, classes = datasets.load_digits(return_X_y=True)
    original = rows(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(classes))
    assert rows(images, labels) == original
    shares = test.tensors[1].bincount() / labels.bincount()
    assert ((shares - 0.2).abs() < 0.01).all()


def test_the_split_follows_the_seed() -> None:
    pytest.importorskip("sklearn.datasets")
    first, again, other = (digits.load(seed=seed)[1].tensors[0] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_as_images() -> None:
    pytest.importorskip("sklearn.datasets")
    flat, images = (digits.load(flat=flat)[0].tensors[0] for flat in (True, False))
    assert images.shape == (1438, 1, 8, 8)
    assert torch.equal(images.flatten(1), flat)


def test_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"pip install 'scikit-learn>=1.5'"):
        digits.load()
