"""Trains a model that is placed by an example, and says how much memory it took."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import trireme

LAYERS, BATCH = 8, 16


class Deep(nn.Module):
    """Square layers, so that nearly all memory is that of parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(LAYERS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return x


def peak_bytes() -> int:
    """The largest memory that this process has had."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--width", type=int, required=True)
    options = parser.parse_args()
    inputs = torch.randn(4 * BATCH, options.width, generator=torch.Generator().manual_seed(1))
    session = trireme.Session(
        lambda: Deep(options.width),
        lambda outputs, targets: (outputs - targets).square().mean(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.001),
        max_steps=4,
        graph=trireme.GraphConfig(example=inputs[:BATCH]),
        checkpoint=trireme.Checkpoint(every_seconds=None),
    )
    data = TensorDataset(inputs, 0.5 * inputs)
    with session:
        losses = [session.step(batch).loss for batch in session.loader(data, BATCH)]
        losses.append(session.evaluate(data, batch_size=2 * BATCH)["loss"])
    report = options.out / f"big-{session.task.index}.json"
    report.write_text(json.dumps({"peak": peak_bytes(), "losses": losses}))


main()
