"""Click prediction: DLRM with a wide part, on files in Criteo's format.

    python examples/click_prediction.py                                    one process
    trireme run --ps 2 --workers 2 examples/click_prediction.py            asynchronous
    trireme run --ps 2 --workers 2 --strategy sync examples/click_prediction.py

By default the files are made, in a temporary directory, from planted probabilities of clicks, so
that the best AUC that can be reached is known. Criteo's own data (the Kaggle challenge of 2014; the
terabyte is split into files of days) has no labels in its test.txt, so hold out its last rows:

    tar -xzf dac.tar.gz train.txt
    head -n 39000000 train.txt > first.txt && tail -n +39000001 train.txt > last.txt
    trireme run --ps 2 --workers 2 examples/click_prediction.py --data first.txt --test last.txt

Rows of the embeddings lie in sparse tables; only those of a batch travel. `--dense --bits 16` keeps
them in `torch.nn.Embedding` instead, whose gradients and values travel whole: at the end each run
prints how many bytes a step takes. Source of the model: Naumov et al., Deep Learning Recommendation
Model for Personalization and Recommendation Systems (2019), section 2; the wide part is that of
Cheng et al., Wide & Deep Learning for Recommender Systems (2016), section 3.1.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from sparse_data import ClickBatch, CriteoReader, log_scale
from sparse_data.planted_clicks import PlantedClicks
from sparse_data.ranking import AreaUnderCurve
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as log_loss

import trireme
from trireme.tables.table_spec import Adagrad, Initializer, Normal, Zeros

COUNTS, CATEGORIES = 13, 26
RATE = 0.05


class ClickModel(nn.Module):
    """The logit of a click: the sum of a weight for each category, and DLRM.

    Args:
        width: the size of a category's vector.
        admit_after: a category has rows from this batch on, counting those that it comes in.
        dense: the number of rows of dense embeddings; None for sparse tables.
    """

    def __init__(self, width: int, admit_after: int, dense: int | None) -> None:
        super().__init__()

        def arguments(initializer: Initializer) -> dict[str, object]:
            return {
                "optimizer": Adagrad(RATE),
                "initializer": initializer,
                "admit_after": admit_after,
                "ids": lambda batch: batch.keys,
            }

        self.wide: nn.Module
        self.vectors: nn.Module
        if dense is None:
            self.wide = trireme.EmbeddingBag(None, 1, mode="sum", **arguments(Zeros()))
            self.vectors = trireme.Embedding(None, width, **arguments(Normal(std=0.01)))
        else:
            self.wide = nn.EmbeddingBag(dense, 1, mode="sum")
            self.vectors = nn.Embedding(dense, width)
            nn.init.zeros_(self.wide.weight)
            nn.init.normal_(self.vectors.weight, std=0.01)
        self.bottom = nn.Sequential(nn.Linear(COUNTS, 32), nn.ReLU(), nn.Linear(32, width))
        self.slopes = nn.Linear(COUNTS, 1)
        pairs = (CATEGORIES + 1) ** 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, counts: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Returns the logit of each row, shape (rows,); see `ClickBatch` for the arguments."""
        numbers = log_scale(counts)
        bottom = self.bottom(numbers)
        vectors = torch.cat([bottom[:, None], self.vectors(keys)], 1)
        products = (vectors @ vectors.mT).tril(-1)  # zeros cost less here than a choice of entries
        deep = self.top(torch.cat([bottom, products.flatten(1)], 1))
        return (self.wide(keys) + self.slopes(numbers) + deep)[:, 0]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", metavar="FILE", help="default: files are generated")
    parser.add_argument("--test", nargs="+", metavar="FILE", help="rows that are held out")
    parser.add_argument("--rows", type=int, default=3_000_000, metavar="N", help="generated")
    parser.add_argument("--epochs", type=float, default=1, metavar="N")
    parser.add_argument("--batch-size", "--batch_size", type=int, default=1000, metavar="N")
    parser.add_argument("--bits", type=int, default=40, help="categories are hashed to 2^BITS")
    parser.add_argument("--width", type=int, default=8, metavar="N", help="of a category's vector")
    parser.add_argument("--admit-after", "--admit_after", type=int, default=100, metavar="N")
    parser.add_argument("--dense", action="store_true", help="2^BITS rows of torch.nn.Embedding")
    parser.add_argument("--run-dir", "--run_dir", default="runs/click_prediction", metavar="DIR")
    given = parser.parse_args(trireme.program_arguments())
    if given.data and not given.test:
        parser.error("--data needs --test: a file of rows that are held out")
    return given


def main() -> None:
    given = options()
    dense = 1 << given.bits if given.dense else None
    session = trireme.Session(
        lambda: ClickModel(given.width, given.admit_after, dense),
        log_loss,
        lambda parameters: torch.optim.Adagrad(parameters, lr=RATE),
        metrics={"auc": AreaUnderCurve(), "log loss": log_loss},
        run_dir=given.run_dir,
    )
    with session, tempfile.TemporaryDirectory() as directory:
        known = ""
        if not given.data:
            given.data, given.test = [Path(directory, "train")], [Path(directory, "test")]
            planted = PlantedClicks()
            planted.write(given.data[0], given.rows)
            best = planted.write(given.test[0], given.rows // 10, part=1)
            known = f"; the best AUC is {best:.4f}"
        train, held_out = (
            CriteoReader(paths, given.batch_size, hash_bits=given.bits)
            for paths in (given.data, given.test)
        )
        for batch in session.loader(train, 1, epochs=given.epochs, collate_fn=ClickBatch.join):
            session.step(batch)  # an item of the reader is a batch
        if session.is_chief:
            found = session.evaluate(held_out, 1, name="test", collate_fn=ClickBatch.join)
            print(f"test AUC {found['auc']:.4f}, log loss {found['log loss']:.4f}{known}")


if __name__ == "__main__":
    main()
