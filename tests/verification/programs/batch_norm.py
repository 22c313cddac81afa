"""A convolutional network with BatchNorm, trained by a session. `fixed`: with GroupNorm."""

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import trireme


def network():
    norm = nn.GroupNorm(4, 8) if "fixed" in sys.argv else nn.BatchNorm2d(8)
    layers = [nn.Conv2d(1, 8, 3), norm, nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(32, 4))


generator = torch.Generator().manual_seed(5)
data = TensorDataset(
    torch.randn(160, 1, 8, 8, generator=generator), torch.randint(4, (160,), generator=generator)
)
session = trireme.Session(
    network, nn.CrossEntropyLoss(), lambda parameters: torch.optim.SGD(parameters, lr=0.05)
)
with session:
    for batch in session.loader(data, 8, epochs=4):
        session.step(batch)
