"""Matrix factorisation: users and items as rows of sparse tables, learnt from ratings.

    python examples/factorisation.py                                       one process
    trireme run --ps 2 --workers 2 examples/factorisation.py               asynchronous
    trireme run --ps 2 --workers 2 --strategy sync examples/factorisation.py

The ratings are made from planted factors with noise, so that the best error that can be reached is
known: the standard deviation of the noise. Source of the model: Koren, Bell and Volinsky, Matrix
Factorization Techniques for Recommender Systems (IEEE Computer 42(8), 2009), equation 5.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import TensorDataset, random_split

import trireme
from trireme.tables.table_spec import Adagrad, Normal

NOISE = 0.3


class Factors(nn.Module):
    """A rating is the product of a user's and an item's factors, plus a bias of each, and the mean.

    Args:
        rank: the number of factors.
        rate: the learning rate of the rows.
    """

    def __init__(self, rank: int, rate: float) -> None:
        super().__init__()

        def table(column: int) -> trireme.Embedding:
            return trireme.Embedding(
                None,
                rank + 1,
                optimizer=Adagrad(lr=rate),
                initializer=Normal(std=0.3, seed=column),
                ids=lambda batch: batch[0][:, column],
            )

        self.users, self.items = table(0), table(1)
        self.mean = nn.Parameter(torch.zeros(()))

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        """Returns the ratings, of shape (n,), of pairs of user and item: int64, shape (n, 2)."""
        user, item = self.users(pairs[:, 0]), self.items(pairs[:, 1])
        products: torch.Tensor = (user[:, 1:] * item[:, 1:]).sum(1)
        return self.mean + user[:, 0] + item[:, 0] + products


def ratings(count: int, users: int, items: int, rank: int) -> TensorDataset:
    """Returns ratings of planted factors: pairs of a user and an item, and the ratings."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    pairs = torch.stack(
        [torch.randint(size, (count,), generator=generator) for size in (users, items)], 1
    )
    user, item = normal(users, rank)[pairs[:, 0]], normal(items, rank)[pairs[:, 1]]
    biases = 0.5 * (normal(users)[pairs[:, 0]] + normal(items)[pairs[:, 1]])
    values = 3.5 + biases + (user * item).sum(1) / rank**0.5 + NOISE * normal(count)
    return TensorDataset(pairs, values)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ratings", type=int, default=400_000, metavar="N")
    parser.add_argument("--users", type=int, default=4000, metavar="N")
    parser.add_argument("--items", type=int, default=1000, metavar="N")
    parser.add_argument("--rank", type=int, default=4, metavar="N")
    parser.add_argument("--epochs", type=float, default=12, metavar="N")
    parser.add_argument("--batch-size", "--batch_size", type=int, default=2000, metavar="N")
    parser.add_argument("--run-dir", "--run_dir", default="runs/factorisation", metavar="DIR")
    return parser.parse_args(trireme.program_arguments())


def main() -> None:
    given = options()
    data = ratings(given.ratings, given.users, given.items, given.rank)
    held_out = given.ratings // 10
    parts = [given.ratings - held_out, held_out]
    train, test = random_split(data, parts, torch.Generator().manual_seed(1))
    model = Factors(given.rank, rate=0.2)
    session = trireme.Session(
        model,
        nn.functional.mse_loss,
        torch.optim.Adagrad(model.parameters(), lr=0.2),
        run_dir=given.run_dir,
    )
    with session:
        for batch in session.loader(train, given.batch_size, epochs=given.epochs):
            session.step(batch)
        if session.is_chief:
            error = session.evaluate(test, name="test")["loss"] ** 0.5
            print(f"test: root mean squared error {error:.4f}; the best is {NOISE:.4f}")


if __name__ == "__main__":
    main()
