"""A small network for digits, measured by TorchMetrics."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score

import trireme
from trireme.data import digits

batch_size = int(sys.argv[1]) if len(sys.argv) > 1 else 16
train, test = digits.load()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = DataLoader(train, batch_size, shuffle=True, drop_last=True)
metrics = {"f1": MulticlassF1Score(10), "auroc": MulticlassAUROC(10)}

session = trireme.Session(model, nn.CrossEntropyLoss(), optimizer, metrics=metrics, max_steps=178)
with session:
    for batch in session.loader(loader):
        session.step(batch)
    for name, value in session.evaluate(test, batch_size=100).items():
        print(name, value)
