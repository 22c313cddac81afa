"""The classic MNIST program with summaries: all dashboards of TensorBoard for a small network.

A hidden layer of 500 units, dropout that keeps 0.9 of them, Adam at 0.001, 1,000 steps. The test
accuracy every 10 steps; distributions, pictures, and what each operation cost, every 100.

    trireme run --ps 1 --workers 2 --strategy sync examples/mnist_summaries.py --data-dir DIR
    tensorboard --logdir runs/mnist_summaries/tensorboard

With `--strategy async` the other workers continue while the chief evaluates, so the points of the
test curve are further apart.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from typing import Any

import torch
from images import mnist
from torch import nn

import trireme


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", "--data_dir", "--data", default="data/mnist", metavar="DIR")
    parser.add_argument("--max-steps", "--max_steps", type=int, default=1000, metavar="N")
    parser.add_argument("--batch-size", "--batch_size", type=int, default=100, metavar="N")
    parser.add_argument("--learning-rate", "--learning_rate", type=float, default=0.001)
    parser.add_argument("--dropout", type=float, default=0.9, help="the share of units kept")
    parser.add_argument("--run-dir", "--run_dir", default="runs/mnist_summaries", metavar="DIR")
    return parser.parse_args(trireme.program_arguments())


def network(keep: float) -> nn.Module:
    """784-500-10, started as the classic program: truncated normal weights, biases of 0.1."""
    model = nn.Sequential(
        OrderedDict[str, nn.Module](
            layer1=nn.Linear(784, 500),
            relu=nn.ReLU(),
            dropout=nn.Dropout(1 - keep),
            layer2=nn.Linear(500, 10),
        )
    )
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.constant_(parameter, 0.1)
        else:
            nn.init.trunc_normal_(parameter, std=0.1, a=-0.2, b=0.2)
    return model


class TestAccuracy(trireme.Hook):
    """Evaluates every so many global steps: a curve beside that of training."""

    def __init__(self, dataset: Any, every: int) -> None:
        self.dataset, self.every, self.last = dataset, every, 0

    def after_step(self, session: trireme.Session, result: trireme.StepResult) -> None:
        if session.is_chief and result.global_step // self.every > self.last // self.every:
            self.last = result.global_step
            session.evaluate(self.dataset, name="test", batch_size=10_000)


def main() -> None:
    given = options()
    train, _, test = mnist.load(given.data_dir)
    session = trireme.Session(
        lambda: network(given.dropout),
        nn.CrossEntropyLoss(),
        lambda parameters: torch.optim.Adam(parameters, lr=given.learning_rate),
        metrics={"accuracy": trireme.accuracy},
        run_dir=given.run_dir,
        max_steps=given.max_steps,
        log_every=10,
        hooks=[trireme.Summaries(every=100), TestAccuracy(test, every=10)],
    )
    with session:
        for batch in session.loader(train, given.batch_size):
            session.step(batch)
        if session.is_chief:
            result = session.evaluate(test, name="test")
            print(f"test accuracy: {result['accuracy']:.4f}")
            show(session, test)


@torch.no_grad()
def show(session: trireme.Session, test: Any) -> None:
    """Adds what a program may show itself: the test set's curves, and its digits as points."""
    images, labels = test[:1000]
    model = session.model.eval()
    likely = model(images).softmax(1)
    for digit in range(10):
        session.summary.pr_curve(f"test/{digit}", likely[:, digit], labels=labels == digit)
    hidden = model.relu(model.layer1(images))
    pictures = 1 - images.view(-1, 1, 28, 28)
    session.summary.embedding("test/hidden", hidden, metadata=labels.tolist(), label_img=pictures)


if __name__ == "__main__":
    main()
