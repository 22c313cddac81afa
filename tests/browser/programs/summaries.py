"""Trains on the digits for a moment, and records everything there is to record."""

from __future__ import annotations

import argparse
import math
from collections import OrderedDict

import torch
from torch import nn

import trireme
from trireme.data import digits


def network() -> nn.Module:
    layers = OrderedDict[str, nn.Module](
        image=nn.Unflatten(1, (1, 8, 8)),
        conv1=nn.Conv2d(1, 16, 3, padding=1),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(16, 32, 3, padding=1),
        relu2=nn.ReLU(),
        pool=nn.MaxPool2d(2),
        features=nn.Flatten(),
        hidden=nn.Linear(32 * 4 * 4, 128),
        relu3=nn.ReLU(),
        output=nn.Linear(128, 10),
    )
    return nn.Sequential(layers)


def noisy(batch: tuple[torch.Tensor, ...], random: torch.Generator) -> tuple[torch.Tensor, ...]:
    images, labels = batch
    return (images + 0.2 * torch.rand(images.shape, generator=random)).clamp(0, 1), labels


class Evaluations(trireme.Hook):
    def __init__(self, dataset: torch.utils.data.Dataset[object]) -> None:
        self.dataset = dataset

    def after_step(self, session: trireme.Session, result: trireme.StepResult) -> None:
        if session.is_chief and result.global_step % 20 == 0:
            session.evaluate(self.dataset, name="test")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    train, test = digits.load()
    session = trireme.Session(
        network,
        nn.CrossEntropyLoss(),
        lambda parameters: torch.optim.Adam(parameters, lr=2e-3),
        metrics={"accuracy": trireme.accuracy},
        max_steps=given.steps,
        log_every=5,
        hooks=[trireme.Summaries(every=20), Evaluations(test)],
    )
    with session:
        for batch in session.loader(train, 100, transform=noisy):
            session.step(batch)
        seconds = torch.arange(8000) / 8000
        tone = torch.sin(2 * math.pi * 440 * seconds).unsqueeze(0)
        session.summary.audio("tone", tone, sample_rate=8000)
        session.summary.text("note", "what was *found*")


if __name__ == "__main__":
    main()
