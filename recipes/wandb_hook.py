"""A small network for digits, logged to Weights & Biases."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader
from trackers import WandB

import trireme
from trireme.data import digits

batch_size = int(sys.argv[1]) if len(sys.argv) > 1 else 16
train, test = digits.load()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = DataLoader(train, batch_size, shuffle=True, drop_last=True)

hooks = [WandB(every=10, mode="offline")]
session = trireme.Session(model, nn.CrossEntropyLoss(), optimizer, hooks=hooks, max_steps=89)
with session:
    for batch in session.loader(loader):
        session.step(batch)
print("loss", nn.functional.cross_entropy(model(test.tensors[0]), test.tensors[1]).item())
