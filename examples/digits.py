"""A small convolutional network on the digits that ship with scikit-learn: the demo.

    python examples/digits.py                                  one process
    trireme run --ps 1 --workers 2 examples/digits.py          one parameter server, two workers

`make demo` runs the second command, each time in a new run directory. The program is the same for
both; only the launch differs.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict

import torch
from torch import nn

import trireme
from trireme.data import digits


class DigitsNetwork(nn.Sequential):
    """Two convolutions of 3x3, 2x2 pooling and two linear layers, for images of 8x8."""

    def __init__(self, channels: int = 16, hidden: int = 128) -> None:
        super().__init__(
            OrderedDict[str, nn.Module](
                image=nn.Unflatten(1, (1, 8, 8)),
                conv1=nn.Conv2d(1, channels, 3, padding=1),
                relu1=nn.ReLU(),
                conv2=nn.Conv2d(channels, 2 * channels, 3, padding=1),
                relu2=nn.ReLU(),
                pool=nn.MaxPool2d(2),
                features=nn.Flatten(),
                hidden=nn.Linear(2 * channels * 4 * 4, hidden),
                relu3=nn.ReLU(),
                output=nn.Linear(hidden, 10),
            )
        )


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-steps", "--max_steps", type=int, default=2000, metavar="N")
    parser.add_argument("--batch-size", "--batch_size", type=int, default=50, metavar="N")
    parser.add_argument("--learning-rate", "--learning_rate", type=float, default=0.002)
    parser.add_argument("--run-dir", "--run_dir", default="runs/digits", metavar="DIR")
    return parser.parse_args(trireme.program_arguments())


def main() -> None:
    given = options()
    train, test = digits.load()
    session = trireme.Session(
        DigitsNetwork,
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
            result = session.evaluate(test, name="test")
            print(f"test accuracy: {result['accuracy']:.4f}")


if __name__ == "__main__":
    main()
