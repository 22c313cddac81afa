"""A loop with OneCycleLR, which a resumed job begins anew. `fixed`: it follows the job's steps."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trireme

torch.manual_seed(11)
x = torch.randn(240, 6)
y = x.sum(1, keepdim=True)
model = nn.Linear(6, 1)
optimizer = trireme.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=60)
for _, (inputs, targets) in optimizer.epochs(DataLoader(TensorDataset(x, y), 8), 2):
    if "fixed" in sys.argv:
        while schedule.last_epoch < optimizer.loop_steps:
            schedule.step()
    optimizer.zero_grad()
    ((model(inputs) - targets) ** 2).mean().backward()
    optimizer.step()
    if "fixed" not in sys.argv:
        schedule.step()
optimizer.close()
