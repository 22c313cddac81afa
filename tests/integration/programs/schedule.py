"""A loop of its own of ten steps, whose schedule halves the learning rate at each."""

from __future__ import annotations

import torch
from torch import nn

import trireme

model = nn.Linear(2, 1)
optimizer = trireme.distribute(model, torch.optim.SGD(model.parameters(), lr=1.0))
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
for step in range(10):
    while schedule.last_epoch < optimizer.loop_steps:
        schedule.step()
    if step == 0:
        print(f"global step {optimizer.global_step}, rate 2**-{schedule.last_epoch}", flush=True)
    optimizer.zero_grad()
    model(torch.ones(1, 2)).square().mean().backward()
    optimizer.step()
