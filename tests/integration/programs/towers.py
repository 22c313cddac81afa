"""Trains two towers on two tasks, long enough that something can happen to one of them."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import trireme
from tests.faults import Fault, Faults


class Towers(nn.Module):
    """The sum of two towers, each of which is computed by a task of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        with trireme.device("worker:0"):
            self.left = self._tower(width)
        with trireme.device("worker:1"):
            self.right = self._tower(width)

    @staticmethod
    def _tower(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(20, width), nn.Tanh(), nn.Linear(width, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.left(x), self.right(x)
        with trireme.device("worker:0"):
            scores: torch.Tensor = left + right
        return scores


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-steps", type=int, default=40)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--fault", type=Fault.parse, action="append", default=[])
    parser.add_argument("--every-steps", type=int, help="save a checkpoint each so many")
    options = parser.parse_args()
    inputs = torch.randn(500, 20, generator=torch.Generator().manual_seed(1))
    session = trireme.Session(
        lambda: Towers(options.width),
        nn.CrossEntropyLoss(),
        lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        max_steps=options.max_steps,
        deterministic=True,
        checkpoint=trireme.Checkpoint(every_seconds=None, every_steps=options.every_steps),
        hooks=[Faults(options.fault, options.out)],
    )
    with session:
        data = TensorDataset(inputs, inputs[:, :10].argmax(1))
        for batch in session.loader(data, options.batch_size):
            session.step(batch)
    if session.is_chief:
        state = {name: value.clone() for name, value in session.model.state_dict().items()}
        torch.save({**state, "restored": session.restored_from or 0}, options.out / "end.pt")


main()
