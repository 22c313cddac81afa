from __future__ import annotations

import pytest
import torch

from trireme.dashboards.image_grids import as_images, filters, grid


def test_a_grid_has_each_image_where_it_belongs() -> None:
    images = torch.arange(3, dtype=torch.float32).view(3, 1, 1, 1).expand(3, 1, 200, 200) / 2
    picture = grid(images)
    assert picture.shape == (1, 401, 401)
    assert picture[0, 0, 0] == 0
    assert picture[0, 0, 201] == 0.5
    assert picture[0, 201, 0] == 1
    assert picture[0, :, 200].eq(1).all()  # the line between


def test_small_pictures_are_enlarged_pixel_by_pixel() -> None:
    picture = grid(torch.tensor([[[[0.0, 1.0], [1.0, 0.0]]]]))
    assert picture.shape == (1, 256, 256)
    assert picture[0, :128, :128].eq(0).all()
    assert picture[0, :128, 128:].eq(1).all()


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
    weight = torch.zeros(4, 3, 150, 150)
    weight[0], weight[1] = 2.0, -1.0
    picture = filters(weight)
    assert picture is not None
    assert picture[0, 0, 0] == 1.0
    assert picture[0, 0, 151] == 0.25
    assert picture[0, 151, 0] == 0.5
    of_rows = filters(torch.randn(500, 784))
    assert of_rows is not None
    assert of_rows.shape[0] == 1
    assert filters(torch.randn(8, 64, 3, 3)) is None  # not over images
    assert filters(torch.randn(8, 10)) is None
    assert filters(torch.randn(8, 3, 1, 1)) is None
