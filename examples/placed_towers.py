"""Two towers of a network on two tasks, as the multi-GPU towers of the classic programs.

    python examples/placed_towers.py                                             one process
    trireme run --workers 2 --strategy graph --log-placement examples/placed_towers.py

One tower looks at the left half of each image, the other one at the right half; their scores are
added. The scopes say where each of them is computed: the first and the sum on `worker:0`, the
second on `worker:1`. Without `--strategy graph` they have no effect. `--check` compares what the
tasks together make of the first batch, and of all steps, with what one process makes of them.
"""

from __future__ import annotations

import argparse
import copy

import torch
from torch import nn

import trireme
from trireme.data import digits


def tower() -> nn.Module:
    """Looks at half of an image: 8 rows and 4 columns."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(32, 512),
        nn.ReLU(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


class Towers(nn.Module):
    """Adds the scores of two towers."""

    def __init__(self) -> None:
        super().__init__()
        with trireme.device("worker:0"):
            self.left = tower()
        with trireme.device("worker:1"):
            self.right = tower()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns scores of shape (examples, 10) for images of shape (examples, 64)."""
        rows = images.reshape(-1, 8, 8)
        left, right = self.left(rows[..., :4]), self.right(rows[..., 4:])
        with trireme.device("worker:0"):
            scores: torch.Tensor = left + right
        return scores


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-steps", "--max_steps", type=int, default=50, metavar="N")
    parser.add_argument("--batch-size", "--batch_size", type=int, default=256, metavar="N")
    parser.add_argument("--learning-rate", "--learning_rate", type=float, default=0.1)
    parser.add_argument("--run-dir", "--run_dir", default=None, metavar="DIR")
    parser.add_argument("--check", action="store_true", help="compare with one process")
    return parser.parse_args(trireme.program_arguments())


def alone(
    model: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]], learning_rate: float
) -> list[float]:
    """Trains a model in plain PyTorch; returns the loss of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    losses = []
    for images, labels in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    given = options()
    train, test = digits.load()
    session = trireme.Session(
        Towers,
        nn.CrossEntropyLoss(),
        lambda parameters: torch.optim.SGD(parameters, lr=given.learning_rate),
        metrics={"accuracy": trireme.accuracy},
        run_dir=given.run_dir,
        max_steps=given.max_steps,
    )
    batches, losses = [], []
    with session:
        plain = copy.deepcopy(session.model)
        for batch in session.loader(train, given.batch_size):
            losses.append(session.step(batch).loss)
            if given.check:
                batches.append(tuple(tensor.clone() for tensor in batch))
        if session.is_chief:
            result = session.evaluate(test, name="test")
            print(f"test accuracy: {result['accuracy']:.4f}")
    if given.check and session.is_chief and not batches:
        print("nothing to compare with one process: no step was made")
    elif given.check and session.is_chief:
        wanted = alone(plain, batches, given.learning_rate)
        pairs = zip(session.model.parameters(), plain.parameters(), strict=True)
        parameters = max((one - other).abs().max().item() for one, other in pairs)
        print(
            f"compared with one process: the loss of the first step differs by "
            f"{abs(losses[0] - wanted[0]):.1e}, parameters after {len(losses)} steps by at most "
            f"{parameters:.1e}"
        )


if __name__ == "__main__":
    main()
