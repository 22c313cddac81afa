"""Tensors as images: batches, and filters."""

from __future__ import annotations

import math

import torch

_SHOWN = 64


def as_images(inputs: torch.Tensor, count: int = 16) -> torch.Tensor | None:
    """Returns the first examples of a batch as images in [0, 1]; None if they are not images.

    Images are (N, 1 or 3, height, width), or rows of as many values as a square has pixels, from
    8x8. Those that are not in [0, 1] are brought there, each for itself.
    """
    images = _pixels(inputs[:count])
    if images is None or not images.numel():
        return None
    if images.dtype == torch.uint8:
        return images.float() / 255
    images = images.float()
    low, high = torch.aminmax(images)
    if low >= 0 and high <= 1:
        return images
    lows, highs = (bound((1, 2, 3), keepdim=True) for bound in (images.amin, images.amax))
    return (images - lows) / (highs - lows).clamp_min(1e-12)


def filters(weight: torch.Tensor) -> torch.Tensor | None:
    """Returns at most 64 units of a first layer as images; None if its inputs are not images.

    `weight` is that of a convolution over images (units, 1 or 3, height, width), or of a linear
    layer (units, inputs) whose inputs are the pixels of a square, from 8x8.
    """
    images = _pixels(weight[:_SHOWN].float())
    if images is None or images.shape[2:].numel() < 4:
        return None
    # All on one scale, with zero in the middle: so strong units can be told from weak ones.
    largest = images.abs().amax().clamp_min(1e-12)
    return images / (2 * largest) + 0.5


def _pixels(values: torch.Tensor) -> torch.Tensor | None:
    images = values.detach()
    if images.dim() == 2:
        side = math.isqrt(images.shape[1])
        if side * side == images.shape[1] and side >= 8:
            images = images.reshape(-1, 1, side, side)
    return images if images.dim() == 4 and images.shape[1] in (1, 3) else None
