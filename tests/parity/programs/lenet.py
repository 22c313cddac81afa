"""Trains LeNet-5 as the launch says, and leaves the values that each worker ends with."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

import trireme
from tests.parity.lenet import STEPS, images, network


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    data = images(options.data_dir)
    session = trireme.Session(
        network(data, smooth=True),
        nn.CrossEntropyLoss(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        max_steps=STEPS,
    )
    with session:
        for batch in session.loader(data, options.batch_size):
            session.step(batch)
    save_file(dict(session.model.state_dict()), options.out / f"{session.task.index}.safetensors")


main()
