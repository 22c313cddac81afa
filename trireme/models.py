"""The networks of the first programs: MLP and DigitsNetwork. They know nothing of parallelism."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise

from torch import nn


class MLP(nn.Sequential):
    """Linear layers with ReLU between them, for inputs of any shape that has `widths[0]` values.

    Takes (N, ...) and returns (N, widths[-1]), without a final non-linearity. `MLP(784, 100, 10)`
    has one hidden layer; its parameters are `hidden1.weight`, `hidden1.bias`, `output.weight` and
    `output.bias`.
    """

    def __init__(self, *widths: int) -> None:
        """Makes a network of len(widths) - 1 linear layers, initialised as `nn.Linear` does.

        Raises:
            ValueError: there are fewer than two widths, or one below 1.
        """
        if len(widths) < 2 or min(widths) < 1:
            raise ValueError(f"MLP{widths}: give at least the widths of input and output, from 1")
        layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
        for number, (width, next_width) in enumerate(pairwise(widths[:-1]), start=1):
            layers[f"hidden{number}"] = nn.Linear(width, next_width)
            layers[f"relu{number}"] = nn.ReLU()
        layers["output"] = nn.Linear(widths[-2], widths[-1])
        super().__init__(layers)


class DigitsNetwork(nn.Sequential):
    """Two convolutions of 3x3, 2x2 pooling and two linear layers, for images of 8x8.

    Takes (N, 64) or (N, 1, 8, 8) and returns (N, classes). With Adam at 1e-3 it reaches 98% on the
    digits' test set in a few hundred batches of 100.
    """

    def __init__(self, classes: int = 10, channels: int = 16, hidden: int = 128) -> None:
        """Makes the network, initialised as torch's layers do.

        Args:
            classes: the number of classes.
            channels: the channels of the first convolution; the second has twice as many.
            hidden: the width of the hidden linear layer.
        """
        super().__init__(
            OrderedDict[str, nn.Module](
                flatten=nn.Flatten(),
                image=nn.Unflatten(1, (1, 8, 8)),
                conv1=nn.Conv2d(1, channels, 3, padding=1),
                relu1=nn.ReLU(),
                conv2=nn.Conv2d(channels, 2 * channels, 3, padding=1),
                relu2=nn.ReLU(),
                pool=nn.MaxPool2d(2),
                features=nn.Flatten(),
                hidden=nn.Linear(2 * channels * 4 * 4, hidden),
                relu3=nn.ReLU(),
                output=nn.Linear(hidden, classes),
            )
        )
