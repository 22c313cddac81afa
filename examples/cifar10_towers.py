"""Towers: LeNet-5 on CIFAR-10, one replica on each GPU, whose gradients are averaged.

The classic multi-GPU program: distorted crops of 28x28, batches of 64 a tower, Adam with a
learning rate that decays by 0.99 every 64 steps, L2 on the weights, a moving average for the
evaluation; loss and accuracy, averaged over the towers, every 100 steps.

    trireme run --workers auto examples/cifar10_towers.py --data-dir DIR      one tower a GPU
    trireme run --workers 2 examples/cifar10_towers.py --data-dir DIR         two, on CPUs too
    python examples/cifar10_towers.py --data-dir DIR                          one

A step takes a batch of every tower: `--max-steps` with twice the towers sees twice the examples.
"""

from __future__ import annotations

import argparse

import torch
from images import augment, cifar
from images.networks import LeNet5
from torch import nn

import trireme

SIZE = 28


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", "--data_dir", default="data/cifar-10-batches-bin")
    parser.add_argument("--max-steps", "--max_steps", type=int, default=2000, metavar="N")
    parser.add_argument("--batch-size", "--batch_size", type=int, default=64, metavar="N")
    parser.add_argument("--learning-rate", "--learning_rate", type=float, default=0.001)
    parser.add_argument("--run-dir", "--run_dir", default="runs/cifar10_towers", metavar="DIR")
    return parser.parse_args(trireme.program_arguments())


def main() -> None:
    given = options()
    train, test = cifar.load(given.data_dir)
    session = trireme.Session(
        lambda: LeNet5(3, SIZE),
        nn.CrossEntropyLoss(),
        lambda parameters: torch.optim.Adam(parameters, lr=given.learning_rate),
        metrics={"accuracy": trireme.accuracy},
        run_dir=given.run_dir,
        max_steps=given.max_steps,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 64, gamma=0.99),
        l2=1e-4,
        ema=0.99,
        log_every=100,
    )
    with session:
        distorted = augment.OnInputs(augment.training(SIZE))
        for batch in session.loader(train, given.batch_size, transform=distorted):
            session.step(batch)
        if session.is_chief:
            cropped = augment.OnInputs(augment.evaluation(SIZE))
            result = session.evaluate(test, name="test", transform=cropped)
            print(f"test accuracy: {result['accuracy']:.4f}")


if __name__ == "__main__":
    main()
