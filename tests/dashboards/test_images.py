from __future__ import annotations

import pytest
import torch

from trireme.dashboards.images import as_images, filters


def test_what_is_an_image() -> None:
    colour = torch.rand(20, 3, 24, 24)
    shown = as_images(colour)
    assert shown is not None
    assert torch.equal(shown, colour[:16])  # within [0, 1]: as it is
    bytes_ = as_images(torch.full((2, 1, 8, 8), 51, dtype=torch.uint8))
    assert bytes_ is not None
    assert bytes_.unique().tolist() == pytest.approx([0.2])
    rows = as_images(torch.rand(5, 784), 2)
    assert rows is not None
    assert rows.shape == (2, 1, 28, 28)
    assert as_images(torch.rand(5, 10)) is None
    assert as_images(torch.rand(5, 9)) is None  # a square, and too small to be an image
    assert as_images(torch.rand(5, 7, 8, 8)) is None
    assert as_images(torch.rand(0, 3, 8, 8)) is None


def test_standardized_images_are_brought_back_one_by_one() -> None:
    images = torch.stack([torch.linspace(-3, 5, 64), torch.linspace(0, 1, 64)]).view(2, 1, 8, 8)
    shown = as_images(images)
    assert shown is not None
    for image in shown:
        assert (image.min(), image.max()) == (0, 1)


def test_filters_have_zero_in_the_middle_and_one_scale() -> None:
    weight = torch.zeros(4, 3, 5, 5)
    weight[0], weight[1] = 2.0, -1.0
    images = filters(weight)
    assert images is not None
    assert images[:, 0, 0, 0].tolist() == [1.0, 0.25, 0.5, 0.5]
    of_rows = filters(torch.randn(500, 784))
    assert of_rows is not None
    assert of_rows.shape == (64, 1, 28, 28)
    assert filters(torch.randn(8, 64, 3, 3)) is None  # not over images
    assert filters(torch.randn(8, 10)) is None
    assert filters(torch.randn(8, 3, 1, 1)) is None
