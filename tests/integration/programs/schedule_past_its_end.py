"""A loop of its own that steps a schedule past its end, as the faster worker does."""

from __future__ import annotations

import torch
from torch import nn

import trireme

model = nn.Linear(2, 1)
optimizer = trireme.distribute(model, torch.optim.SGD(model.parameters(), lr=1.0))
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=3)
while not optimizer.should_stop():
    optimizer.zero_grad()
    model(torch.ones(1, 2)).square().mean().backward()
    optimizer.step()
    if optimizer.replica:
        schedule.step()
