"""A plain loop that clips its gradients by their norm. `fixed`: the norm of the mean."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trireme

torch.manual_seed(3)
x = torch.randn(256, 12)
y = (x[:, 0] * x[:, 1] > 0).long()
model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 2))
optimizer = trireme.distribute(model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
for _, (inputs, labels) in optimizer.epochs(DataLoader(TensorDataset(x, y), 16, shuffle=True), 3):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), labels).backward()
    if "fixed" in sys.argv:
        optimizer.synchronize()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
optimizer.close()
