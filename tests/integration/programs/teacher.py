"""A loop whose worker 0 is killed; its teacher, a frozen parameter, counts its passes."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
from torch import nn

import trireme

DIES_AT = 60


def main() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    model.teacher = nn.Parameter(torch.zeros(3), requires_grad=False)
    model.register_buffer("seen", torch.zeros(1, dtype=torch.int64))
    optimizer = trireme.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01))
    first = optimizer.global_step == 0
    print(f"begins {first} {model.teacher[1].item():.0f} {model.seen.item()}", flush=True)
    while not optimizer.should_stop() and optimizer.global_step < int(sys.argv[1]):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        model.teacher.data = model.teacher.data + 1.0  # no write that PyTorch counts
        model.seen += 1
        if first and optimizer.worker.task.index == 0 and model.seen == DIES_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)
    optimizer.close()


if __name__ == "__main__":
    main()
