"""Pictures of tensors: batches of images, filters and feature maps as one grid each."""

from __future__ import annotations

import math

import torch
from torch import nn

__all__ = ["as_images", "feature_maps", "filters", "grid"]

_SHOWN = 64
_SMALLEST_SIDE = 256  # pixels; smaller pictures are enlarged


def as_images(inputs: torch.Tensor, count: int = 16) -> torch.Tensor | None:
    """Returns the first examples of a batch as images; None if they are not images.

    Images are (N, 1 or 3, height, width), or rows of as many values as a square has pixels, from
    8x8.

    Returns:
        Floats in [0, 1] of shape (at most `count`, 1 or 3, height, width).
    """
    images = inputs[:count].detach()
    if images.dim() == 2 and (side := _side(images.shape[1])) is not None:
        images = images.view(-1, 1, side, side)
    if images.dim() != 4 or images.shape[1] not in (1, 3) or not images.numel():
        return None
    if images.dtype == torch.uint8:
        return images.float() / 255
    return _normalized(images.float())


def filters(weight: torch.Tensor) -> torch.Tensor | None:
    """Returns the weights of a first layer as a picture; None if its inputs are not images.

    Args:
        weight: the weight of a convolution over images (units, 1 or 3, height, width), or of a
            linear layer (units, inputs) whose inputs are the pixels of a square, from 8x8.

    Returns:
        A picture as from `grid`, of at most 64 units.
    """
    weight = weight[:_SHOWN].detach().float()
    if weight.dim() == 2 and (side := _side(weight.shape[1])) is not None:
        weight = weight.reshape(-1, 1, side, side)
    if weight.dim() != 4 or weight.shape[1] not in (1, 3) or weight.shape[2:].numel() < 4:
        return None
    # All on one scale, with zero in the middle: so strong units can be told from weak ones.
    largest = weight.abs().amax().clamp_min(1e-12)
    return grid(weight / (2 * largest) + 0.5)


def feature_maps(outputs: torch.Tensor) -> torch.Tensor | None:
    """Returns a layer's outputs for the first example as a picture; None if they are not images.

    Args:
        outputs: the outputs of the layer, of shape (N, channels, height, width).

    Returns:
        A picture as from `grid`, of at most 64 channels in grey, all on one scale.
    """
    if outputs.dim() != 4 or not outputs.numel() or outputs.shape[2:].numel() < 4:
        return None
    maps = outputs[0, :_SHOWN].detach().float()
    low, high = torch.aminmax(maps)
    return grid(((maps - low) / (high - low).clamp_min(1e-12)).unsqueeze(1))


def grid(images: torch.Tensor) -> torch.Tensor:
    """Returns images side by side, in as many columns as rows; a small picture is enlarged.

    Args:
        images: floats in [0, 1] of shape (N, channels, height, width), N from 1.

    Returns:
        One picture (channels, height, width).
    """
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


def _side(pixels: int) -> int | None:
    side = math.isqrt(pixels)
    return side if side * side == pixels and side >= 8 else None


def _normalized(images: torch.Tensor) -> torch.Tensor:
    """Brings each image into [0, 1], unless all are there already."""
    low, high = torch.aminmax(images)
    if low >= 0 and high <= 1:
        return images
    flat = images.flatten(1)
    lows, highs = flat.amin(1), flat.amax(1)
    shape = (-1, 1, 1, 1)
    return (images - lows.view(shape)) / (highs - lows).clamp_min(1e-12).view(shape)
