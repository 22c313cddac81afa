"""In-graph replication: one graph with several towers that share parameters, each on its own task.

    python examples/in_graph_replication.py                                      one process
    trireme run --workers 2 --strategy graph --log-placement examples/in_graph_replication.py
    trireme run --ps 1 --workers 1 --mesh graph=2 examples/in_graph_replication.py

The classic program of one client: a loop over the workers builds a tower on each. Every tower
computes the loss of its part of the batch with the same parameters, and the graph takes the mean
of the losses; its backward pass adds the gradients of the towers. There is one model, one optimizer
and one step of all towers together, whatever the launch. Without parameter servers the parameters
lie with one task, which sends them to the others once a step.

`--towers N` is how many towers there are. The scopes say where each is computed; where the job has
no such task, as in one process, they have no effect. `--check` compares the losses and the
parameters of all steps with those of one process without towers.
"""

from __future__ import annotations

import argparse
import copy
from itertools import pairwise

import torch
from torch import nn
from torch.utils.data import TensorDataset

import trireme
from trireme.data import digits


class Towers(nn.Module):
    """Computes the loss of a batch in towers, which share the parameters of one network.

    Args:
        towers: how many there are.
    """

    def __init__(self, towers: int) -> None:
        super().__init__()
        self.towers = towers
        with trireme.device("ps:0"):  # without servers the parameters lie with a task
            self.network = nn.Sequential(
                nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
            )

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the mean loss and the scores of images, which are divided among the towers.

        Args:
            images: shape (examples, 64), at least one for each tower.
            labels: the class of each, shape (examples).
        """
        examples = images.shape[0]
        bounds = [tower * examples // self.towers for tower in range(self.towers + 1)]
        losses, scores = [], []
        for tower, (first, end) in enumerate(pairwise(bounds)):
            with trireme.device(f"worker:{tower}"):
                scores.append(self.network(images[first:end]))
                losses.append(
                    nn.functional.cross_entropy(scores[-1], labels[first:end], reduction="sum")
                )
        with trireme.device("worker:0"):
            return {"loss": torch.stack(losses).sum() / examples, "scores": torch.cat(scores)}


def named(dataset: TensorDataset) -> list[dict[str, torch.Tensor]]:
    """Returns the examples as arguments of the model, which needs the labels for its loss."""
    return [{"images": image, "labels": label} for image, label in dataset]


def accuracy(outputs: dict[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    """Returns the share of images that are classified rightly."""
    return trireme.accuracy(outputs["scores"], labels)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--towers", type=int, default=2, metavar="N")
    parser.add_argument("--max-steps", "--max_steps", type=int, default=200, metavar="N")
    parser.add_argument("--batch-size", "--batch_size", type=int, default=128, metavar="N")
    parser.add_argument("--learning-rate", "--learning_rate", type=float, default=0.1)
    parser.add_argument("--run-dir", "--run_dir", default=None, metavar="DIR")
    parser.add_argument("--check", action="store_true", help="compare with one process")
    return parser.parse_args(trireme.program_arguments())


def alone(model: Towers, batches: list[dict[str, torch.Tensor]], learning_rate: float) -> float:
    """Trains the network in plain PyTorch, without towers; returns the loss of the last step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    value = float("nan")
    for batch in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model.network(batch["images"]), batch["labels"])
        loss.backward()
        optimizer.step()
        value = loss.item()
    return value


def main() -> None:
    given = options()
    train, test = map(named, digits.load())
    session = trireme.Session(
        lambda: Towers(given.towers),
        trireme.model_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=given.learning_rate),
        metrics={"accuracy": accuracy},
        run_dir=given.run_dir,
        max_steps=given.max_steps,
    )
    batches, last = [], float("nan")
    with session:
        plain = copy.deepcopy(session.model)
        for batch in session.loader(train, given.batch_size):
            result = session.step(batch)
            if given.check:
                batches.append({name: tensor.clone() for name, tensor in batch.data.items()})
                last = result.loss
        if session.is_chief:
            found = session.evaluate(test, name="test")
            print(f"test accuracy: {found['accuracy']:.4f}")
    if given.check and session.is_chief and not batches:
        print("nothing to compare with one process: no step was made")
    elif given.check and session.is_chief:
        wanted = alone(plain, batches, given.learning_rate)
        pairs = zip(session.model.parameters(), plain.parameters(), strict=True)
        parameters = max((one - other).abs().max().item() for one, other in pairs)
        print(
            f"compared with one process: the loss of the last step differs by "
            f"{abs(last - wanted):.1e}, parameters after {len(batches)} steps by at most "
            f"{parameters:.1e}"
        )


if __name__ == "__main__":
    main()
