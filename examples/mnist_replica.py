"""The classic replicated MNIST program: one hidden layer of 100, Adam at 0.01, batches of 100.

The launch configures how the replicas work together:

    trireme run --ps 1 --workers 2 --strategy async examples/mnist_replica.py --data-dir DIR
    trireme run --ps 2 --workers 2 --strategy sync ...                 synchronous, two servers
    trireme run --ps 1 --workers 3 --strategy sync --aggregate 2 ...   with one backup worker

or by hand, one task a terminal:

    trireme task --job_name=worker --task_index=0 --ps_hosts=localhost:2222 \
        --worker_hosts=localhost:2223,localhost:2224 examples/mnist_replica.py --data_dir DIR
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
    parser.add_argument("--max-steps", "--max_steps", "--train_steps", type=int, default=4000)
    parser.add_argument("--hidden-units", "--hidden_units", type=int, default=100, metavar="N")
    parser.add_argument("--batch-size", "--batch_size", type=int, default=100, metavar="N")
    parser.add_argument("--learning-rate", "--learning_rate", type=float, default=0.01)
    parser.add_argument("--run-dir", "--run_dir", metavar="DIR", help="default: keep nothing")
    return parser.parse_args(trireme.program_arguments())


def main() -> None:
    given = options()
    train, validation, test = mnist.load(given.data_dir)
    session = trireme.Session(
        lambda: initialized(MLP(784, given.hidden_units, 10)),
        nn.CrossEntropyLoss(),
        lambda parameters: torch.optim.Adam(parameters, lr=given.learning_rate),
        metrics={"accuracy": trireme.accuracy},
        run_dir=given.run_dir,
        max_steps=given.max_steps,
    )
    with session:
        for batch in session.loader(train, given.batch_size):
            session.step(batch)
        if session.is_chief:
            result = session.evaluate(validation)
            print(f"validation cross entropy: {result['loss']:.4f}")
            result = session.evaluate(test, name="test")
            print(f"test accuracy: {result['accuracy']:.4f}")


def initialized(model: MLP) -> MLP:
    """Starts as the classic program: truncated normal weights, biases of zero."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        else:
            deviation = parameter.shape[1] ** -0.5
            nn.init.trunc_normal_(parameter, 0.0, deviation, -2 * deviation, 2 * deviation)
    return model


if __name__ == "__main__":
    main()
