"""Networks that classify images: LeNet-5, and that of the CIFAR-10 tutorial."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn
from torch.nn import functional as F


class LeNet5(nn.Sequential):
    """LeNet-5 (LeCun et al., Gradient-based learning applied to document recognition, 1998, II.B).

    Two convolutions of 5x5 with 6 and 16 channels, each followed by 2x2 pooling, then linear
    layers of 120, 84 and `classes`. As is usual now, with ReLU, max pooling and a linear output
    where the paper has tanh, trainable averages and radial basis functions.

    The first convolution keeps the size (the paper pads MNIST to 32x32), the second takes off 4,
    except that it too keeps the size of images below 16x16, of which nothing would be left.

    Takes (N, channels, size, size), or (N, channels * size * size), and returns (N, classes).
    """

    def __init__(self, channels: int = 1, size: int = 28, classes: int = 10) -> None:
        """Makes the network, initialised as torch's layers do.

        Raises:
            ValueError: the images are smaller than 8x8.
        """
        if size < 8:
            raise ValueError(f"images of {size}x{size} are too small: from 8x8 on")
        padding = 2 if size < 16 else 0
        side = (size // 2 + 2 * padding - 4) // 2
        features = nn.Sequential(
            nn.Conv2d(channels, 6, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5, padding=padding),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(16 * side * side, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, classes),
        )
        shape = nn.Unflatten(1, (channels, size, size))
        super().__init__(
            OrderedDict(flat=nn.Flatten(), images=shape, features=features, classifier=classifier)
        )


class LocalResponseNorm(nn.Module):
    """y = x / (bias + alpha * s) ** beta, with s the sum of x^2 over neighbouring channels.

    Neighbours are at most `radius` channels away. This is `tf.nn.local_response_normalization`
    (Krizhevsky, Sutskever, Hinton: ImageNet classification with deep convolutional neural networks,
    2012, 3.3). `torch.nn.LocalResponseNorm` computes the same with its alpha divided by its
    window's size; on a CPU it takes four times as long.

    Takes and returns (N, channels, H, W).
    """

    window: torch.Tensor

    def __init__(
        self,
        channels: int,
        radius: int = 4,
        *,
        bias: float = 1.0,
        alpha: float = 0.001 / 9,
        beta: float = 0.75,
    ) -> None:
        super().__init__()
        self.bias, self.alpha, self.beta = bias, alpha, beta
        channel = torch.arange(channels)
        nearby = (channel[:, None] - channel).abs() <= radius
        # A constant: the sum over a window of channels is a 1x1 convolution with zeros and ones.
        self.register_buffer("window", nearby.float()[:, :, None, None], persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns the normalized inputs."""
        nearby = F.conv2d(inputs * inputs, self.window)
        return inputs * (self.bias + self.alpha * nearby).pow(-self.beta)


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
