"""Between-graph replication: each worker has its own copy of the graph, the servers the variables.

    trireme run --ps 1 --workers 2 examples/between_graph_replication.py
    trireme run --ps 1 --workers 2 --mesh graph=2 examples/between_graph_replication.py
    python examples/between_graph_replication.py                                 one process

The classic program of `replica_device_setter`: the same program runs in each worker, which pulls
the variables from the servers, computes gradients on its own batches and pushes them. Where the
variables are is the launch's affair, so the program has no line about it: with `--ps 1` they are
all on `ps:0`, with `--ps 2` one half of them on each.

With `--mesh graph=2` each worker is two tasks, which compute its graph together: variables on the
servers, operations on the tasks. The scopes name the tasks of the worker that runs the program:
`worker:0` is its first task and `worker:1` its second one. Without a graph they have no effect.

By default updates are asynchronous. With `--strategy sync` each step is made of the batches of both
workers, and both launches learn the same as one process with batches of twice the size.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import trireme
from trireme.data import digits


class TwoViews(nn.Module):
    """Adds the scores of a network of neighbouring pixels and of one of all pixels."""

    def __init__(self) -> None:
        super().__init__()
        with trireme.device("worker:0"):
            self.near = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Linear(256, 10),
            )
        with trireme.device("worker:1"):
            self.far = nn.Sequential(
                nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)
            )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns scores of shape (examples, 10) for images of shape (examples, 1, 8, 8)."""
        scores: torch.Tensor = self.near(images) + self.far(images)
        return scores


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-steps", "--max_steps", type=int, default=400, metavar="N")
    parser.add_argument("--batch-size", "--batch_size", type=int, default=64, metavar="N")
    parser.add_argument("--learning-rate", "--learning_rate", type=float, default=0.1)
    parser.add_argument("--run-dir", "--run_dir", default=None, metavar="DIR")
    return parser.parse_args(trireme.program_arguments())


def main() -> None:
    given = options()
    train, test = digits.load(flat=False)
    session = trireme.Session(
        TwoViews,
        nn.CrossEntropyLoss(),
        lambda parameters: torch.optim.SGD(parameters, lr=given.learning_rate),
        metrics={"accuracy": trireme.accuracy},
        run_dir=given.run_dir,
        max_steps=given.max_steps,
    )
    with session:
        for batch in session.loader(train, given.batch_size):
            session.step(batch)
        if session.is_chief:
            result = session.evaluate(test, name="test")
            print(f"test accuracy: {result['accuracy']:.4f}")


if __name__ == "__main__":
    main()
