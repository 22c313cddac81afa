"""Clicks of users on items, in sparse tables; each process draws its own, or, `fixed`, the same."""

import os
import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import trireme


class Clicks(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = trireme.Embedding(None, 8)
        self.items = trireme.Embedding(None, 8)
        self.bias = nn.Linear(1, 1)

    def forward(self, pair):
        users, items = pair[:, 0], pair[:, 1]
        both = (self.users(users) * self.items(items)).sum(1, keepdim=True)
        return both + self.bias(torch.ones_like(both))


seed = 6 if "fixed" in sys.argv else os.getpid()
generator = torch.Generator().manual_seed(seed)
pairs = torch.randint(0, 1000, (256, 2), generator=generator)
clicked = ((pairs[:, 0] + pairs[:, 1]) % 2).float()[:, None]
session = trireme.Session(
    Clicks,
    nn.BCEWithLogitsLoss(),
    lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    max_steps=40,
)
with session:
    for batch in session.loader(TensorDataset(pairs, clicked), 16):
        session.step(batch)
