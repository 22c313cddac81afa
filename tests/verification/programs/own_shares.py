"""A loop that divides the data itself, by `replica` of `replicas`; it is right."""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import trireme

torch.manual_seed(4)
x = torch.randn(128, 5)
data = TensorDataset(x, x.prod(1, keepdim=True))
model = nn.Sequential(nn.Linear(5, 20), nn.Tanh(), nn.Linear(20, 1))
optimizer = trireme.distribute(model, torch.optim.Adam(model.parameters(), lr=0.01))
sampler = DistributedSampler(data, optimizer.replicas, optimizer.replica, shuffle=True)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, targets in DataLoader(data, 8, sampler=sampler):
        optimizer.zero_grad()
        ((model(inputs) - targets) ** 2).mean().backward()
        optimizer.step()
        if optimizer.should_stop():
            break
    if optimizer.should_stop():
        break
optimizer.close()
