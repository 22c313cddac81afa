"""The classic CIFAR-10 tutorial on any number of workers.

Two convolutions with local response normalization, random crops to 24x24, flips, brightness and
contrast, a moving average of the parameters for the evaluation. Each worker prints its
speed every 10 steps.

    trireme run --ps 1 --workers 2 examples/cifar10.py --data-dir DIR
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from images import augment, cifar
from images.networks import CifarNetwork
from torch import nn

import trireme
from trireme.session.hooks import Hook

SIZE = 24


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", "--data_dir", default="data/cifar-10-batches-bin")
    parser.add_argument("--max-steps", "--max_steps", type=int, default=5000, metavar="N")
    parser.add_argument("--batch-size", "--batch_size", type=int, default=128, metavar="N")
    parser.add_argument("--learning-rate", "--learning_rate", type=float, default=0.1)
    parser.add_argument("--run-dir", "--run_dir", default="runs/cifar10", metavar="DIR")
    return parser.parse_args(trireme.program_arguments())


class Speed(Hook):
    """Prints the tutorial's line every so many of the worker's steps."""

    def __init__(self, every: int = 10) -> None:
        self.every = every
        self.steps = 0
        self.since = time.perf_counter()

    def on_start(self, session: trireme.Session) -> None:
        self.since = time.perf_counter()

    def after_step(self, session: trireme.Session, result: trireme.StepResult) -> None:
        self.steps += 1
        if self.steps % self.every == 0:
            now = time.perf_counter()
            seconds, self.since = (now - self.since) / self.every, now
            print(
                f"step {result.global_step}, loss = {result.loss:.2f} "
                f"({result.examples / seconds:.1f} examples/sec; {seconds:.3f} sec/batch)"
            )


def optimizer_of(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """SGD, with the tutorial's L2 loss of 0.004 on the weights of the two hidden layers."""
    decayed = [model.get_parameter("hidden3.weight"), model.get_parameter("hidden4.weight")]
    others = [p for p in model.parameters() if all(p is not other for other in decayed)]
    groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": 0.004}, {"params": others}]
    return torch.optim.SGD(groups, lr=learning_rate)


def main() -> None:
    given = options()
    train, test = cifar.load(given.data_dir)
    model = CifarNetwork(SIZE)
    session = trireme.Session(
        model,
        nn.CrossEntropyLoss(),
        optimizer_of(model, given.learning_rate),
        metrics={"accuracy": trireme.accuracy},
        run_dir=given.run_dir,
        max_steps=given.max_steps,
        ema=0.9999,
        checkpoint=trireme.Checkpoint(every_steps=1000, every_seconds=None),
        hooks=[Speed()],
    )
    with session:
        augmented = augment.OnInputs(augment.training(SIZE))
        for batch in session.loader(train, given.batch_size, transform=augmented):
            session.step(batch)
        if session.is_chief:
            cropped = augment.OnInputs(augment.evaluation(SIZE))
            result = session.evaluate(test, name="test", transform=cropped)
            print(f"test accuracy: {result['accuracy']:.4f}")


if __name__ == "__main__":
    main()
