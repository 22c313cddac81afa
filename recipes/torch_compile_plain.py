"""A small network for digits, compiled by `torch.compile`."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader

from trireme.data import digits

batch_size = int(sys.argv[1]) if len(sys.argv) > 1 else 16
train, test = digits.load()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
model = torch.compile(model, dynamic=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = DataLoader(train, batch_size, shuffle=True, drop_last=True)

for _ in range(2):
    for batch, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch), targets).backward()
        optimizer.step()
print("loss", nn.functional.cross_entropy(model(test.tensors[0]), test.tensors[1]).item())
