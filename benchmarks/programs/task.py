"""What the replica programs have in common: which network, trained how. Standard library only."""

from __future__ import annotations

import argparse
from dataclasses import dataclass


@dataclass(frozen=True)
class Training:
    """How a network is trained, by every contender alike.

    Attributes:
        title: what it is.
        batch: examples a step of one worker.
        optimizer: a class of `torch.optim`.
        learning_rate: its `lr`.
    """

    title: str
    batch: int
    optimizer: str
    learning_rate: float


VOCABULARY, TIME, WIDTH, LAYERS = 256, 64, 128, 6
"""Of the transformer."""

NETWORKS = {
    "mlp": Training("MNIST replica program, 784-100-10", 100, "Adam", 0.01),
    "lenet": Training("LeNet-5 on 28x28", 100, "Adam", 0.001),
    "cifar": Training("CIFAR network on 24x24", 128, "SGD", 0.05),
    "transformer": Training(
        f"transformer of {LAYERS} blocks, width {WIDTH}, {TIME} tokens", 32, "SGD", 0.01
    ),
    "wide": Training("25 million parameters, 1024-4096-4096-1000", 256, "Adam", 0.0001),
}
"""The networks by name; see `networks.make_network`."""


def arguments() -> argparse.ArgumentParser:
    """Returns the options that every replica program takes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lanes", required=True, help="the directory with the gate")
    parser.add_argument("--data", required=True, help="the directory with inputs.npy, targets.npy")
    parser.add_argument("--network", default="mlp", choices=sorted(NETWORKS))
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--features", type=int, default=0, help="of a logistic regression")
    return parser
