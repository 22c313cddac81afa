"""Pictures of tensors: batches of images, and filters, as one grid each."""

from __future__ import annotations

import math

import torch
from torch import nn

_SHOWN = 64
_SMALLEST_SIDE = 256  # pixels; smaller pictures are enlarged


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
    """Returns at most 64 units of a first layer as a grid; None if its inputs are not images.

    `weight` is that of a convolution over images (units, 1 or 3, height, width), or of a linear
    layer (units, inputs) whose inputs are the pixels of a square, from 8x8.
    """
    images = _pixels(weight[:_SHOWN].float())
    if images is None or images.shape[2:].numel() < 4:
        return None
    # All on one scale, with zero in the middle: so strong units can be told from weak ones.
    largest = images.abs().amax().clamp_min(1e-12)
    return grid(images / (2 * largest) + 0.5)


def grid(images: torch.Tensor) -> torch.Tensor:
    """Returns images in [0, 1] side by side, in as many columns as rows; enlarged if small."""
    images = images.detach().cpu()
    number, channels, height, width = images.shape
    columns = math.ceil(math.sqrt(number))
    rows = math.ceil(number / columns)
    # A line of one pixel between them, in white.
    cells = torch.ones(rows * columns, channels, height + 1, width + 1)
    cells[:number, :, :height, :width] = images
    cells = cells.view(rows, columns, channels, height + 1, width + 1)
    picture = cells.permute(2, 0, 3, 1, 4).reshape(
        channels, rows * (height + 1), columns * (width + 1)
    )[:, :-1, :-1]
    factor = math.ceil(_SMALLEST_SIDE / min(picture.shape[1:]))
    return nn.functional.interpolate(picture.unsqueeze(0), scale_factor=factor)[0]


def _pixels(values: torch.Tensor) -> torch.Tensor | None:
    images = values.detach()
    if images.dim() == 2:
        side = math.isqrt(images.shape[1])
        if side * side == images.shape[1] and side >= 8:
            images = images.reshape(-1, 1, side, side)
    return images if images.dim() == 4 and images.shape[1] in (1, 3) else None
