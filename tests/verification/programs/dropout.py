"""Dropout, and noise that NumPy draws: in the loop, or, `fixed`, where an example is loaded."""

import sys

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import trireme

FIXED = "fixed" in sys.argv


class Noisy(Dataset):
    def __init__(self):
        self.x = np.linspace(-2, 2, 128, dtype=np.float32)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        noise = np.random.normal(0, 0.1) if FIXED else 0.0
        return np.float32([self.x[index] + noise]), np.float32([np.sin(self.x[index])])


np.random.seed(7)
torch.manual_seed(7)
model = nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 1))
optimizer = trireme.distribute(model, torch.optim.Adam(model.parameters(), lr=0.01))
for _, (x, y) in optimizer.epochs(DataLoader(Noisy(), 8, shuffle=True), 3):
    if not FIXED:
        x = x + torch.from_numpy(np.random.normal(0, 0.1, x.shape).astype(np.float32))
    optimizer.zero_grad()
    ((model(x) - y) ** 2).mean().backward()
    optimizer.step()
optimizer.close()
