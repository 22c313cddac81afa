"""Augmentation against direct formulas, example by example."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from images import augment
from torch.nn import functional as F

RANDOM = {
    "crop": augment.RandomCrop(5),
    "padded crop": augment.RandomCrop(8, padding=2),
    "flip": augment.Flip(),
    "brightness": augment.Brightness(63),
    "contrast": augment.Contrast(0.2, 1.8),
    "classic": augment.training(6),
}
FIXED = {
    "center": augment.CenterCrop(4),
    "standardize": augment.Standardize(),
    "classic": augment.evaluation(6),
}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(count: int = 200, size: int = 8) -> torch.Tensor:
    return torch.randint(256, (count, 3, size, size), dtype=torch.uint8, generator=seeded(1))


def windows(image: torch.Tensor, size: int) -> dict[tuple[int, int], torch.Tensor]:
    height, width = image.shape[1:]
    return {
        (top, left): image[:, top : top + size, left : left + size]
        for top in range(height - size + 1)
        for left in range(width - size + 1)
    }


@pytest.mark.parametrize(("name", "padding"), [("crop", 0), ("padded crop", 2)])
def test_a_crop_is_a_window_and_every_window_comes(name: str, padding: int) -> None:
    crop = RANDOM[name]
    before = images(600)
    after = crop(before, seeded())
    assert after.dtype == torch.uint8
    seen = []
    for image, cropped in zip(F.pad(before, (padding,) * 4), after, strict=True):
        places = windows(image, crop.size)
        seen += [place for place, window in places.items() if torch.equal(window, cropped)]
    assert len(seen) >= 600, "not a window of its own image"
    assert set(seen) == set(places)


def test_center_crop_takes_the_middle() -> None:
    before = images(3)
    assert torch.equal(augment.CenterCrop(4)(before), before[:, :, 2:6, 2:6])
    assert torch.equal(augment.CenterCrop(5)(before), before[:, :, 1:6, 1:6])
    assert torch.equal(augment.CenterCrop(8)(before), before)


def test_flip_mirrors_about_half() -> None:
    before = images(1000)
    after = augment.Flip()(before, seeded())
    mirrored = [torch.equal(a, b.flip(2)) for a, b in zip(after, before, strict=True)]
    kept = [torch.equal(a, b) for a, b in zip(after, before, strict=True)]
    assert all(m != k for m, k in zip(mirrored, kept, strict=True))
    assert 430 < sum(mirrored) < 570


def test_brightness_adds_one_number_an_image() -> None:
    before = images(500)
    added = augment.Brightness(63)(before, seeded()) - before.float()
    each = added.flatten(1)
    assert torch.allclose(each, each[:, :1].expand_as(each), atol=1e-4)
    assert -63 <= each.min() < -55
    assert 55 < each.max() < 63
    assert abs(each[:, 0].mean()) < 8


def test_contrast_scales_about_the_mean_of_each_channel() -> None:
    before = images(500).double()
    after = augment.Contrast(0.2, 1.8)(before, seeded())
    assert torch.allclose(after.mean((2, 3)), before.mean((2, 3)))
    factors = after.std((2, 3)) / before.std((2, 3))
    assert torch.allclose(factors, factors[:, :1].expand_as(factors))
    assert 0.2 <= factors.min() < 0.25
    assert 1.75 < factors.max() < 1.8
    mean = before[7, 1].mean()
    assert torch.allclose(after[7, 1], (before[7, 1] - mean) * factors[7, 1] + mean)


@pytest.mark.parametrize("kind", [torch.uint8, torch.float32, torch.float64])
def test_standardize_is_tensorflows_formula(kind: torch.dtype) -> None:
    before = images(20).to(kind)
    before[3] = 7  # of one colour: the deviation is 0
    before[4] = 100
    before[4, 0, 0, 0] = 101  # a deviation of 0.0720, just below the bound of 0.0722
    after = augment.Standardize()(before)
    assert after.dtype == (torch.float32 if kind == torch.uint8 else kind)
    for image, result in zip(before, after, strict=True):
        values = [float(value) for value in image.flatten()]
        mean = math.fsum(values) / len(values)
        deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))
        divisor = max(deviation, 1 / math.sqrt(len(values)))
        wanted = torch.tensor([(value - mean) / divisor for value in values], dtype=after.dtype)
        assert torch.allclose(result.flatten(), wanted, atol=1e-4)


@pytest.mark.parametrize("name", RANDOM)
def test_the_generator_decides(name: str) -> None:
    before = images()
    kept = before.clone()
    first, again, other = (RANDOM[name](before, seeded(seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(before, kept), "the input was changed"


@pytest.mark.parametrize("name", FIXED)
def test_evaluation_draws_nothing(name: str) -> None:
    before = images().float()
    kept = before.clone()
    generator = seeded()
    assert torch.equal(FIXED[name](before, generator), FIXED[name](before))
    assert torch.equal(generator.get_state(), seeded().get_state())
    assert torch.equal(before, kept), "the input was changed"


@pytest.mark.parametrize("name", RANDOM)
def test_without_a_generator_nothing_is_drawn(name: str) -> None:
    with pytest.raises(ValueError, match="needs a generator"):
        RANDOM[name](images())


@pytest.mark.parametrize("make", [augment.RandomCrop, augment.CenterCrop])
def test_a_crop_larger_than_the_image(make: Callable[[int], augment.Transform]) -> None:
    for size in (0, 9):
        with pytest.raises(ValueError, match=f"cannot cut {size}x{size} out of images of 8x8"):
            make(size)(images(), seeded())


def test_the_classic_pipeline() -> None:
    before = images(8, size=32)
    after = augment.training(24)(before, seeded())
    assert after.shape == (8, 3, 24, 24)
    steps = augment.training(24).transforms
    assert steps == (
        augment.RandomCrop(24),
        augment.Flip(),
        augment.Brightness(63),
        augment.Contrast(0.2, 1.8),
        augment.Standardize(),
    )
    plain = augment.evaluation(24)(before)
    assert torch.equal(plain, augment.Standardize()(before[:, :, 4:28, 4:28]))


def test_on_inputs_leaves_the_other_fields() -> None:
    labels = torch.arange(3)
    inputs, targets, more = augment.OnInputs(augment.CenterCrop(2))((images(3), labels, "x"))
    assert inputs.shape == (3, 3, 2, 2)
    assert targets is labels
    assert more == "x"
