"""A loop of its own on three epochs; worker 1 kills itself once, in the second of them.

It does so when the chief has saved what the program keeps. Worker 0 takes one batch of the second
epoch, so that it saves, and leaves worker 1 the next ones until it is killed, however late worker 1
begins; and it begins the third epoch when worker 1 is there again.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trireme

ROWS, EPOCHS = 120, 3

data = TensorDataset(torch.arange(float(ROWS)).reshape(ROWS, 1))
model = nn.Linear(1, 1)
sgd = torch.optim.SGD(model.parameters(), lr=1e-6)
optimizer = trireme.distribute(model, sgd, checkpoint=trireme.Checkpoint(every_steps=5))
kept = torch.optim.SGD([torch.zeros(1)], lr=0.5)  # stands for any object with a state
if optimizer.keep("own", kept):
    print(f"has kept {kept.param_groups[0]['lr']}", flush=True)
kept.param_groups[0]["lr"] = 0.25
killed, back = Path("killed"), Path("back")
if killed.exists():
    back.touch()
deadline = time.monotonic() + 120.0


def wait_for(done: Callable[[], bool]) -> None:
    while not done() and time.monotonic() < deadline:
        time.sleep(0.05)


def saved() -> bool:
    return any(Path("run/checkpoints").glob("step-*"))


taken = 0  # batches of the second epoch
for epoch, (rows,) in optimizer.epochs(DataLoader(data, 4, shuffle=True), EPOCHS):
    if epoch == 1 and optimizer.replica == 1 and not killed.exists():
        wait_for(saved)
        killed.touch()
        print(f"dies in epoch {epoch}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if epoch == 1 and optimizer.replica == 0:
        if taken == 1:
            wait_for(killed.exists)
        taken += 1
    if epoch == 2:
        wait_for(back.exists)
    optimizer.zero_grad()
    model(rows).square().mean().backward()
    optimizer.step()
    print("used", epoch, *(int(row) for row in rows.flatten()), flush=True)
print("ends", flush=True)
