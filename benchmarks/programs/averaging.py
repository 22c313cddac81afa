"""A small network on MNIST through the public session; the chief leaves its curve as JSON."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from images import mnist
from images.networks import LeNet5
from torch import nn

import trireme
from trireme.models import MLP

MODELS = {"mlp": lambda: MLP(784, 100, 10), "lenet": LeNet5}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    train, _, test = mnist.load(given.data)
    session = trireme.Session(
        MODELS[given.model],
        nn.CrossEntropyLoss(),
        lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        metrics={"accuracy": trireme.accuracy},
        max_steps=given.steps,
        seed=given.seed,
    )
    curve: list[tuple[int, float]] = []
    with session:
        total = made = 0.0
        for batch in session.loader(train, 50):
            result = session.step(batch)
            total, made = total + result.loss, made + 1
            if made == 50:
                curve.append((result.global_step, total / made))
                total = made = 0.0
        if session.is_chief:
            reached = session.evaluate(test, name="test")
            given.out.write_text(json.dumps({"curve": curve, **reached}))


if __name__ == "__main__":
    main()
