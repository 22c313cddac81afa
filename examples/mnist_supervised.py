"""The classic supervised MNIST program: saves as it goes, and goes on where it was stopped.

One hidden layer of 500; L2 of 1e-4 on the weights; a learning rate that decays by 0.99 an epoch,
counted by the global step; a checkpoint every 60 seconds; a line every 100 steps.

    trireme run --ps 1 --workers 2 examples/mnist_supervised.py --data-dir DIR

Stop it with Ctrl-C and give the same command again.
"""

from __future__ import annotations

import argparse

import torch
from images import mnist
from torch import nn

import trireme
from trireme.models import MLP


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", "--data_dir", default="data/mnist", metavar="DIR")
    parser.add_argument("--max-steps", "--max_steps", type=int, default=10000, metavar="N")
    parser.add_argument("--batch-size", "--batch_size", type=int, default=100, metavar="N")
    parser.add_argument("--learning-rate", "--learning_rate", type=float, default=0.01)
    parser.add_argument("--run-dir", "--run_dir", default="runs/mnist_supervised", metavar="DIR")
    return parser.parse_args(trireme.program_arguments())


def main() -> None:
    given = options()
    train, validation, test = mnist.load(given.data_dir)
    steps_an_epoch = len(train) / given.batch_size
    session = trireme.Session(
        MLP(784, 500, 10),
        nn.CrossEntropyLoss(),
        lambda parameters: torch.optim.SGD(parameters, lr=given.learning_rate, momentum=0.9),
        metrics={"accuracy": trireme.accuracy},
        run_dir=given.run_dir,
        max_steps=given.max_steps,
        l2=1e-4,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda global_step: 0.99 ** (global_step / steps_an_epoch)
        ),
        checkpoint=trireme.Checkpoint(every_seconds=60),
        log_every=100,
    )
    with session:
        for batch in session.loader(train, given.batch_size):
            session.step(batch)
        if session.is_chief:
            session.evaluate(validation)
            result = session.evaluate(test, name="test")
            print(f"test accuracy: {result['accuracy']:.4f}")


if __name__ == "__main__":
    main()
