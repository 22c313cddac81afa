"""Trains a small network, with nothing random in it, and leaves its values; for meshes too."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import TensorDataset

import trireme


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-steps", type=int, required=True)
    options = parser.parse_args()
    inputs = torch.randn(512, 20, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs[:, :10].argmax(1))
    session = trireme.Session(
        lambda: nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 32), nn.Linear(32, 10)),
        nn.CrossEntropyLoss(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        max_steps=options.max_steps,
    )
    with session:
        for batch in session.loader(data, 16):
            session.step(batch)
        loss = session.evaluate(data)["loss"]
        if session.is_chief:
            values = session.worker.backend.snapshot(state=False).values
            save_file({**values, "loss": torch.tensor(loss)}, options.out)


main()
