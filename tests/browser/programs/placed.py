"""Trains two towers on the digits for a moment, each of them on a task."""

from __future__ import annotations

import torch
from torch import nn

import trireme
from trireme.data import digits


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with trireme.device("worker:0"):
            self.left = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        with trireme.device("worker:1"):
            self.right = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        left, right = self.left(images), self.right(images)
        with trireme.device("worker:0"):
            scores: torch.Tensor = left + right
        return scores


def main() -> None:
    train, _ = digits.load()
    session = trireme.Session(
        Towers,
        nn.CrossEntropyLoss(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        max_steps=10,
        checkpoint=None,
        hooks=[trireme.Summaries(every=10)],
    )
    with session:
        for batch in session.loader(train, 100):
            session.step(batch)


if __name__ == "__main__":
    main()
