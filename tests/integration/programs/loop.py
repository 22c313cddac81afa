"""A loop of its own over random numbers, from other first values in each process, and one seed."""

from __future__ import annotations

import argparse
import random

import numpy as np
import torch
from torch import nn

import trireme


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-steps", type=int, default=12)
    parser.add_argument("--close", action="store_true", help="leave the job at the end")
    options = parser.parse_args()
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    optimizer = trireme.distribute(
        model, torch.optim.Adam(model.parameters(), lr=0.01), max_steps=options.max_steps
    )
    draws = f"{torch.rand(1).item()} {random.random()} {np.random.rand()}"
    # One write a line: torchrun's processes share one output.
    print(f"draws: {draws}\n", end="", flush=True)
    generator = torch.Generator().manual_seed(optimizer.replica)
    while not optimizer.should_stop():
        inputs = torch.randn(16, 8, generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), inputs[:, :4].argmax(1)).backward()
        optimizer.step()
    total = 0.0
    for parameter in model.parameters():
        joined = getattr(parameter, "full_tensor", None)
        total += float((parameter if joined is None else joined()).double().abs().sum())
    ends = f"replica {optimizer.replica} of {optimizer.replicas}: {total:.12f}\n"
    print(ends, end="", flush=True)
    if options.close:
        optimizer.close()


main()
