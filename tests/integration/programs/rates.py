"""Rates of 1, 2 and 4 by the global step: the values count the steps that were made at each."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import trireme

DATA = TensorDataset(torch.zeros(1000, 1))
BATCH = 4


def rate(step: int) -> float:
    return 1.0 if step < 30 else 2.0 if step < 60 else 4.0


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return -self.count.sum()


class Steps:
    """Counts the steps of a loop."""

    made = 0

    def state_dict(self) -> dict[str, Any]:
        return {"made": self.made}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.made = state_dict["made"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--own-loop", action="store_true")
    given = parser.parse_args()
    saves = trireme.Checkpoint(every_steps=given.every, every_seconds=None)
    options: dict[str, Any] = {"max_steps": given.steps, "checkpoint": saves}
    if given.own_loop:
        model = Counted()
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = trireme.distribute(model, sgd, **options)
        schedule, steps = LambdaLR(optimizer, rate), Steps()
        optimizer.keep("schedule", schedule)
        optimizer.keep("steps", steps)
        for _, (inputs,) in optimizer.epochs(DataLoader(DATA, BATCH), 100):
            while schedule.last_epoch < optimizer.loop_steps:
                schedule.step()
            _pause(optimizer.global_step)
            optimizer.zero_grad()
            model(inputs).backward()
            optimizer.step()
            steps.made += 1
            if optimizer.should_stop():
                break
        optimizer.close()
        print(f"made {steps.made}")
        return
    session = trireme.Session(
        Counted(),
        lambda outputs, targets: outputs,
        lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        scheduler=lambda made: LambdaLR(made, rate),
        **options,
    )
    with session:
        for batch in session.loader(DATA, BATCH):
            _pause(session.global_step)
            session.step((batch[0], batch[0]))


def _pause(step: int) -> None:
    """Leaves time to kill servers after step 65, until the test says that it has."""
    if not Path("released").exists():
        time.sleep(0.05 if step < 65 else 2.0)


if __name__ == "__main__":
    main()
