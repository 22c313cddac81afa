"""The network of the first programs, which knows nothing of parallelism."""

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
