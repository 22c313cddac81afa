"""The network of the classic TensorFlow CIFAR-10 tutorial."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from trireme.models.response_norm import LocalResponseNorm

__all__ = ["CifarNetwork"]


class CifarNetwork(nn.Sequential):
    """Two convolutions, each pooled and normalized, and two hidden linear layers.

    conv 5x5, 64; ReLU; max pool 3x3 by 2; response normalization; conv 5x5, 64; ReLU; response
    normalization; max pool 3x3 by 2; linear 384; ReLU; linear 192; ReLU; linear. Layers keep the
    size of their input where nothing else is said. Weights start from truncated normal
    distributions and biases from the constants of the tutorial, where `hidden3.weight` and
    `hidden4.weight` also have an L2 loss of 0.004.

    Takes (N, 3, size, size), standardized, and returns logits of shape (N, classes). With the
    tutorial's crops of 24x24 and ten classes it has 1,068,298 parameters.
    """

    def __init__(self, size: int = 24, classes: int = 10) -> None:
        """Makes the network for images of `size` x `size`.

        Raises:
            ValueError: `size` is no multiple of 4, as two poolings by 2 need it.
        """
        if size < 4 or size % 4:
            raise ValueError(f"images of {size}x{size}: the size must be a multiple of 4")
        side = size // 4
        super().__init__(
            OrderedDict[str, nn.Module](
                layout=_ChannelsLast(),
                conv1=_initialized(nn.Conv2d(3, 64, 5, padding=2), 0.05, 0.0),
                # The tutorial's order is ReLU, pool; the largest value is the same either way,
                # and this way the network's largest tensor is one operation shorter.
                pool1=_halving(),
                relu1=nn.ReLU(),
                norm1=LocalResponseNorm(64),
                conv2=_initialized(nn.Conv2d(64, 64, 5, padding=2), 0.05, 0.1),
                relu2=nn.ReLU(),
                norm2=LocalResponseNorm(64),
                pool2=_halving(),
                flatten=nn.Flatten(),
                hidden3=_initialized(nn.Linear(64 * side * side, 384), 0.04, 0.1),
                relu3=nn.ReLU(),
                hidden4=_initialized(nn.Linear(384, 192), 0.04, 0.1),
                relu4=nn.ReLU(),
                output=_initialized(nn.Linear(192, classes), 1 / 192, 0.0),
            )
        )


class _ChannelsLast(nn.Module):
    """Converts a batch to the channels-last memory format, which later layers keep.

    Pooling and convolution on a CPU are a quarter faster with it.
    """

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.contiguous(memory_format=torch.channels_last)


def _halving() -> nn.MaxPool2d:
    # For even sizes ceil_mode is TensorFlow's SAME: one column of padding, right and below.
    return nn.MaxPool2d(3, stride=2, ceil_mode=True)


@torch.no_grad()
def _initialized(
    layer: nn.Conv2d | nn.Linear, deviation: float, bias: float
) -> nn.Conv2d | nn.Linear:
    # As tf.truncated_normal_initializer: nothing further out than two standard deviations.
    bound = 2 * deviation
    nn.init.trunc_normal_(layer.weight, std=deviation, a=-bound, b=bound)
    assert layer.bias is not None
    nn.init.constant_(layer.bias, bias)
    return layer
