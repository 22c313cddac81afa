"""A small ResNet for digits: mixup, a moving average of the weights, a cosine schedule."""

import sys

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from trireme.data import digits

batch_size = int(sys.argv[1]) if len(sys.argv) > 1 else 16
train, test = digits.load(flat=False)


class Block(nn.Module):
    """Two convolutions beside a connection that leaves them out."""

    def __init__(self, wide: int, out: int, stride: int) -> None:
        super().__init__()
        first = nn.Conv2d(wide, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU()
        self.path = nn.Sequential(*first, nn.Conv2d(out, out, 3, 1, 1), nn.BatchNorm2d(out))
        self.short = nn.Conv2d(wide, out, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.path(x) + self.short(x))


def mixup(examples):
    """Returns a batch of which each example is a mixture of two."""
    images, labels = torch.utils.data.default_collate(examples)
    share, other = torch.rand(()), torch.randperm(len(labels))
    targets = nn.functional.one_hot(labels, 10).float()
    return [share * each + (1 - share) * each[other] for each in (images, targets)]


torch.manual_seed(0)
loader = DataLoader(train, batch_size, shuffle=True, drop_last=True, collate_fn=mixup)
blocks = Block(1, 8, 1), Block(8, 16, 2), Block(16, 32, 2)
model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 89)

average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95), use_buffers=True)
for batch, targets in loader:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(batch), targets).backward()
    optimizer.step()
    average.update_parameters(model)
    schedule.step()
print("loss", nn.functional.cross_entropy(average.eval()(test.tensors[0]), test.tensors[1]).item())
