"""Trains over a `DataLoader` of its own with loader processes, and saves slowly."""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import trireme


class Numbers(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Examples that are made one by one."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((8,), float(index % 7)), torch.tensor(index % 4)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save-seconds", type=float, default=0.0)
    options = parser.parse_args()
    session = trireme.Session(
        nn.Linear(8, 4),
        nn.CrossEntropyLoss(),
        lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        max_steps=10**9,
        log_every=10,
    )
    own = DataLoader(Numbers(), batch_size=16, num_workers=2)
    with session:
        while not session.should_stop():
            for batch in own:
                session.step(batch)
                time.sleep(0.01)
                if session.should_stop():
                    break
        time.sleep(options.save_seconds)  # the values are at the servers meanwhile


main()
