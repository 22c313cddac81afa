"""LeNet-5."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

__all__ = ["LeNet5"]

_SMALLEST = 8


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
        if size < _SMALLEST:
            raise ValueError(f"images of {size}x{size} are too small: from 8x8 on")
        padding = 2 if size < 2 * _SMALLEST else 0
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
