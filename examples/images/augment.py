"""Image augmentation on whole batches, and its counterpart for evaluation.

Each transform is a frozen dataclass called as f(images, generator): it takes a batch (N, C, H, W)
and returns a new one. All randomness is drawn from `generator`, once for each example; transforms
without randomness need no generator. uint8 images keep their dtype through crops and flips, and
become float32, with the same values of 0 to 255, where arithmetic begins.

The pipeline of the classic TensorFlow CIFAR-10 tutorial is `training(24)` and `evaluation(24)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Generator, Tensor
from torch.nn import functional as F


class Transform(Protocol):
    """The interface of transforms of batches of images."""

    def __call__(self, images: Tensor, generator: Generator | None = None) -> Tensor:
        """Returns the new images; leaves `images` as they are.

        Raises:
            ValueError: the images are too small, or no generator was given and one is needed.
        """


@dataclass(frozen=True, slots=True)
class Compose:
    """Applies transforms one after the other."""

    transforms: tuple[Transform, ...]

    def __call__(self, images: Tensor, generator: Generator | None = None) -> Tensor:
        for transform in self.transforms:
            images = transform(images, generator)
        return images


@dataclass(frozen=True, slots=True)
class OnInputs:
    """Applies a transform of images to batches (images, targets), as a loader needs it."""

    transform: Transform

    def __call__(self, batch: Any, generator: Generator | None = None) -> tuple[Any, ...]:
        """Returns the batch with its first field transformed."""
        images, *rest = batch
        return (self.transform(images, generator), *rest)


@dataclass(frozen=True, slots=True)
class RandomCrop:
    """Crops a square from each image at a random position.

    Attributes:
        size: height and width of the result.
        padding: the number of pixels of value 0 that are added on each side before.
    """

    size: int
    padding: int = 0

    def __call__(self, images: Tensor, generator: Generator | None = None) -> Tensor:
        if self.padding:
            images = F.pad(images, (self.padding,) * 4)
        count, _, height, width = images.shape
        _check_fits(self.size, height, width)
        top = torch.randint(height - self.size + 1, (count,), generator=_needed(generator))
        left = torch.randint(width - self.size + 1, (count,), generator=generator)
        # A view of all crops, (N, C, top, left, size, size), of which one an image is copied.
        crops = images.unfold(2, self.size, 1).unfold(3, self.size, 1)
        return crops[torch.arange(count), :, top, left]


@dataclass(frozen=True, slots=True)
class CenterCrop:
    """Crops a square from the middle of each image.

    Attributes:
        size: height and width of the result.
    """

    size: int

    def __call__(self, images: Tensor, generator: Generator | None = None) -> Tensor:
        height, width = images.shape[2:]
        _check_fits(self.size, height, width)
        top, left = (height - self.size) // 2, (width - self.size) // 2
        return images[:, :, top : top + self.size, left : left + self.size].contiguous()


@dataclass(frozen=True, slots=True)
class Flip:
    """Mirrors each image left to right with probability 1/2."""

    def __call__(self, images: Tensor, generator: Generator | None = None) -> Tensor:
        chosen = torch.rand(len(images), generator=_needed(generator)) < 0.5
        which = chosen.nonzero().squeeze(1)
        return images.index_copy(0, which, images.index_select(0, which).flip(3))


@dataclass(frozen=True, slots=True)
class Brightness:
    """Adds one number to all pixels of an image, as `tf.image.random_brightness`. No clipping.

    Standardization removes its effect; it is part of the classic pipeline.

    Attributes:
        delta: the number is drawn from [-delta, delta), on the scale of the pixels.
    """

    delta: float

    def __call__(self, images: Tensor, generator: Generator | None = None) -> Tensor:
        return _floating(images) + _uniform(len(images), -self.delta, self.delta, generator)


@dataclass(frozen=True, slots=True)
class Contrast:
    """Scales the differences of pixels to their channel's mean, as `tf.image.random_contrast`.

    x becomes (x - mean) * factor + mean, with the mean of this channel of this image. No clipping.

    Attributes:
        lower, upper: the factor is drawn from [lower, upper).
    """

    lower: float
    upper: float

    def __call__(self, images: Tensor, generator: Generator | None = None) -> Tensor:
        images = _floating(images)
        factor = _uniform(len(images), self.lower, self.upper, generator)
        mean = images.mean((2, 3), keepdim=True)
        return (images - mean).mul_(factor).add_(mean)


@dataclass(frozen=True, slots=True)
class Standardize:
    """Gives each image mean 0 and variance 1, as `tf.image.per_image_standardization`.

    x becomes (x - mean) / max(std, 1 / sqrt(n)) over the n values of the image; the bound keeps
    images of one colour finite.
    """

    def __call__(self, images: Tensor, generator: Generator | None = None) -> Tensor:
        images = _floating(images)
        count = images[0].numel() if len(images) else 1
        centered = images - images.mean((1, 2, 3), keepdim=True)
        # Ten times as fast as torch.std on the same numbers.
        norm = torch.linalg.vector_norm(centered, dim=(1, 2, 3), keepdim=True)
        return centered.div_(norm.mul_(count**-0.5).clamp_(min=count**-0.5))


def training(size: int) -> Compose:
    """Returns the transform of training images of the classic CIFAR-10 tutorial.

    A random crop to `size`, a flip, brightness up to 63 and contrast 0.2 to 1.8 on pixels of 0 to
    255, then standardization.
    """
    return Compose((RandomCrop(size), Flip(), Brightness(63), Contrast(0.2, 1.8), Standardize()))


def evaluation(size: int) -> Compose:
    """Returns the transform for evaluation, without randomness: center crop, standardization."""
    return Compose((CenterCrop(size), Standardize()))


def _floating(images: Tensor) -> Tensor:
    return images if images.is_floating_point() else images.to(torch.float32)


def _check_fits(size: int, height: int, width: int) -> None:
    if not 1 <= size <= min(height, width):
        raise ValueError(f"cannot cut {size}x{size} out of images of {height}x{width}")


def _uniform(count: int, low: float, high: float, generator: Generator | None) -> Tensor:
    """Returns one number from [low, high) for each image, of shape (count, 1, 1, 1)."""
    drawn = torch.rand(count, 1, 1, 1, generator=_needed(generator))
    return drawn.mul_(high - low).add_(low)


def _needed(generator: Generator | None) -> Generator:
    # Drawing from torch's global generator instead would make a run depend on other draws.
    if generator is None:
        raise ValueError("a random transform needs a generator: f(images, generator)")
    return generator
