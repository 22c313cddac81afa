"""Counts in the parameters how often each example of a stream was used; workers kill themselves.

The gradient of an example is -1 at its own element, and the learning rate is 1: after training,
each element is the number of updates that the example is in.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import IterableDataset

import trireme


class Counts(nn.Module):
    """One element an example."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(size))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return -self.counts[numbers].sum()


class Numbers(IterableDataset[int]):
    """The numbers 0 to size - 1, in an order of each epoch, one after the other."""

    def __init__(self, size: int, first: Path) -> None:
        self.size = size
        self.first = first
        self.epoch = 0
        self.at = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        step = 1 + 2 * self.epoch  # has no factor in common with the size, a power of 10
        step += 2 * (step % 5 == 0)
        with self.first.open("a") as file:
            file.write(f"{os.getpid()} {self.epoch} {self.at}\n")
        while self.at < self.size:
            self.at += 1
            yield (self.at - 1) * step % self.size
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--max-steps", type=int)
    parser.add_argument("--lives", type=int, default=0, help="how often a worker kills itself")
    parser.add_argument("--steps-a-life", type=int, default=100, help="at most, drawn at random")
    words = parser.parse_args()
    words.out.mkdir(exist_ok=True)
    model = Counts(words.size)
    session = trireme.Session(
        model,
        lambda outputs, targets: outputs,
        torch.optim.SGD(model.parameters(), lr=1.0),
        max_steps=words.max_steps,
        checkpoint=trireme.Checkpoint(every_steps=50, keep=2),
    )
    deaths = words.out / f"deaths-{session.task.index}"
    died = len(deaths.read_text()) if deaths.exists() else 0
    chance = random.Random(1000 * session.task.index + died)
    left = chance.randint(1, words.steps_a_life) if died < words.lives else -1
    after = chance.random() < 0.5

    def die() -> None:
        with deaths.open("a") as file:
            file.write("x")
        os.kill(os.getpid(), signal.SIGKILL)

    data = Numbers(words.size, words.out / f"reads-{session.task.index}")
    with session:
        for epoch in session.epochs(words.epochs):
            for batch in session.loader(data, words.batch_size):
                left -= 1
                if left == 0 and not after:
                    die()
                session.step(batch)
                if left == 0:
                    die()
            print(f"worker {session.task.index} has ended epoch {epoch}", flush=True)


if __name__ == "__main__":
    main()
