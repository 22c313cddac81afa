"""Two adapters on a frozen layer: each worker trains one, or, `fixed`, each example names it."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trireme


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(10, 10).requires_grad_(False)
        self.down = nn.ParameterList([nn.Parameter(torch.randn(10, 2) / 3) for _ in range(2)])
        self.up = nn.ParameterList([nn.Parameter(torch.zeros(2, 10)) for _ in range(2)])

    def forward(self, x, kind):
        out = self.base(x)
        for number in range(2):
            chosen = kind == number
            if chosen.any():
                low_rank = x @ self.down[number] @ self.up[number]
                out = out + low_rank * chosen[:, None]
        return out


torch.manual_seed(2)
model = Adapted()
x, kind = torch.randn(192, 10), torch.arange(192) // 12 % 2
data = TensorDataset(x, kind, x.roll(1, 1) * (1 + kind[:, None]))
trained = [each for each in model.parameters() if each.requires_grad]
optimizer = trireme.distribute(model, torch.optim.AdamW(trained, lr=0.02, weight_decay=0.1))
for _, (inputs, kinds, targets) in optimizer.epochs(DataLoader(data, 12), 2):
    if "fixed" not in sys.argv:
        kinds = torch.full_like(kinds, optimizer.replica)
    optimizer.zero_grad()
    ((model(inputs, kinds) - targets) ** 2).mean().backward()
    optimizer.step()
optimizer.close()
