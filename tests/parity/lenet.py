"""LeNet-5 on real images, for tests in this process and for programs in others."""

from __future__ import annotations

from pathlib import Path

import torch
from images import mnist
from images.networks import LeNet5
from torch import nn
from torch.utils.data import TensorDataset

from trireme.data import digits

STEPS, BATCH = 200, 32


def images(folder: Path | None) -> TensorDataset:
    """MNIST where it is, else the digits of scikit-learn."""
    if folder is not None:
        return mnist.load(folder, flat=False)[0]
    inputs, targets = digits.load()[0].tensors
    return TensorDataset(inputs.reshape(-1, 1, 8, 8), targets)


def network(data: TensorDataset, *, smooth: bool) -> nn.Module:
    """LeNet-5 with the same first values each time.

    Args:
        data: what it is to be trained on.
        smooth: make it that of the paper's section II.B: tanh, and averages over 2x2.
    """
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model = LeNet5(size=data.tensors[0].shape[-1])
    if smooth:
        for part in (model.features, model.classifier):
            for place, layer in enumerate(part):
                if isinstance(layer, nn.ReLU):
                    part[place] = nn.Tanh()
                elif isinstance(layer, nn.MaxPool2d):
                    part[place] = nn.AvgPool2d(2)
    return model
