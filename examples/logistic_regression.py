"""Logistic regression on 2^26 features and more: FTRL-proximal on a sparse table of one column.

    python examples/logistic_regression.py                                 one process
    trireme run --ps 2 --workers 2 examples/logistic_regression.py         asynchronous
    trireme run --ps 2 --workers 2 --strategy ssp examples/logistic_regression.py
    trireme run --ps 2 --workers 2 --strategy sync examples/logistic_regression.py

By default the rows are made from planted weights, so that the best AUC that can be reached is
known. Rows of your own stream from disk:

    python examples/logistic_regression.py --data train.libsvm --test test.libsvm
    python examples/logistic_regression.py --data day_0 --test day_1 --format criteo
    python examples/logistic_regression.py --data train.csv --test test.csv --format csv
        --label clicked --categories site device --numbers age      (in one line)

Source of the optimizer: McMahan et al., Ad Click Prediction: a View from the Trenches (KDD 2013),
algorithm 1.
"""

from __future__ import annotations

import argparse

import torch
from sparse_data import ClickBatch, CriteoReader, CsvReader, LibsvmReader, SparseBatch
from sparse_data.planted_regression import PlantedRegression
from sparse_data.ranking import AreaUnderCurve
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as log_loss
from torch.utils.data import IterableDataset

import trireme
from trireme.tables.table_spec import FTRL, Zeros

Rows = IterableDataset[SparseBatch] | IterableDataset[ClickBatch]


class LogisticRegression(nn.Module):
    """A weight for each feature, in a sparse table, and a bias.

    Args:
        optimizer: updates the weights.
    """

    def __init__(self, optimizer: FTRL) -> None:
        super().__init__()
        self.weights = trireme.EmbeddingBag(
            None,
            1,
            mode="sum",
            optimizer=optimizer,
            initializer=Zeros(),
            ids=lambda rows: rows.keys,
        )
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(
        self, offsets: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Returns the logit of each row, shape (rows,); see `SparseBatch` for the arguments."""
        return self.weights(keys, offsets, values)[:, 0] + self.bias


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", metavar="FILE", help="default: rows are generated")
    parser.add_argument("--test", nargs="+", metavar="FILE", help="rows that are held out")
    parser.add_argument("--format", choices=("libsvm", "csv", "criteo"), default="libsvm")
    parser.add_argument("--label", default="label", metavar="COLUMN", help="of a CSV file")
    parser.add_argument("--categories", nargs="*", default=(), metavar="COLUMN")
    parser.add_argument("--numbers", nargs="*", default=(), metavar="COLUMN")
    parser.add_argument(
        "--bits", type=int, default=26, help="of 2^BITS features; libsvm has its own"
    )
    parser.add_argument("--rows", type=int, default=4_000_000, metavar="N", help="generated")
    parser.add_argument("--epochs", type=float, default=1, metavar="N")
    parser.add_argument("--batch-size", "--batch_size", type=int, default=1000, metavar="N")
    parser.add_argument("--alpha", type=float, default=0.1, help="the learning rate")
    parser.add_argument("--l1", type=float, default=8.0, help="keeps rare features at 0")
    parser.add_argument("--run-dir", "--run_dir", default="runs/logistic_regression", metavar="DIR")
    given = parser.parse_args(trireme.program_arguments())
    if given.data and not given.test:
        parser.error("--data needs --test: a file of rows that are held out")
    return given


def read(given: argparse.Namespace, paths: list[str]) -> Rows:
    """Returns a reader of files."""
    if given.format == "libsvm":
        return LibsvmReader(paths, given.batch_size)
    if given.format == "criteo":
        return CriteoReader(paths, given.batch_size, hash_bits=given.bits)
    columns = {name: getattr(given, name) for name in ("label", "categories", "numbers")}
    return CsvReader(paths, given.batch_size, hash_bits=given.bits, **columns)


def joined(batches: list[SparseBatch] | list[ClickBatch]) -> SparseBatch:
    """Returns one batch; an item of a reader is a batch."""
    return SparseBatch.join([b.entries() if isinstance(b, ClickBatch) else b for b in batches])


def data(given: argparse.Namespace) -> tuple[Rows, Rows, float | None]:
    """Returns rows to train on, rows that are held out, and the best AUC on these, if known."""
    if given.data:
        return read(given, given.data), read(given, given.test), None
    planted = PlantedRegression(bits=given.bits)
    held_out = planted.rows(given.rows // 10, given.batch_size, part=1)
    return planted.rows(given.rows, given.batch_size), held_out, planted.best_auc(held_out)


def main() -> None:
    given = options()
    # The loss is a mean over a batch, where FTRL's paper has sums: beta and l1 are divided too.
    scale = 1 / given.batch_size
    model = LogisticRegression(FTRL(alpha=given.alpha, beta=scale, l1=given.l1 * scale))
    session = trireme.Session(
        model,
        log_loss,
        torch.optim.Adagrad(model.parameters(), lr=0.1),
        metrics={"auc": AreaUnderCurve(), "log loss": log_loss},
        run_dir=given.run_dir,
    )
    with session:
        train, held_out, best = data(given)
        for batch in session.loader(train, 1, epochs=given.epochs, collate_fn=joined):
            session.step(batch)
        if session.is_chief:
            found = session.evaluate(held_out, 1, name="test", collate_fn=joined)
            known = "" if best is None else f"; the best AUC is {best:.4f}"
            print(f"test AUC {found['auc']:.4f}, log loss {found['log loss']:.4f}{known}")


if __name__ == "__main__":
    main()
