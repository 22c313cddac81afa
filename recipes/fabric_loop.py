"""A small network for digits, trained in a loop of Lightning Fabric."""

import sys

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader

import trireme
from trireme.data import digits

batch_size = int(sys.argv[1]) if len(sys.argv) > 1 else 16
train, test = digits.load()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

optimizer = trireme.distribute(model, optimizer, clip_norm=1.0)
loader = optimizer.prepare(DataLoader(train, batch_size), epochs=2)
fabric = Fabric(accelerator="cpu", devices=1)
model, optimizer = fabric.setup(model, optimizer)
for _ in range(2):
    for images, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        fabric.backward(loss)
        optimizer.step()
images, labels = test.tensors
print("loss", nn.functional.cross_entropy(model(images), labels).item())
