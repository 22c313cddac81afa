"""A number by which workers, and a resumed job, notice that they deal examples in other orders."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Dataset, Subset

from trireme.data.order import Order

_MOST_PARTS = 100


def fingerprint(order: Order, dataset: object = None) -> int:
    """Returns a number of 1 to 2**56 that other orders of examples do not have, but by chance.

    It covers which examples a position means: the order, and the indices of a `Subset` (as of
    `random_split`) or of a selection of Hugging Face's `Dataset`, also inside each other, and
    inside data sets of the program that have others as attributes. It does not cover the examples
    themselves, as what makes them may be random.
    """
    digest = hashlib.blake2b(digest_size=7)
    for part in (*order.content(), *_selections(dataset, ())):
        data = part.tobytes() if isinstance(part, np.ndarray) else repr(part).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return 1 + int.from_bytes(digest.digest(), "little")


def _selections(dataset: object, outer: tuple[int, ...]) -> Iterator[Any]:
    """Yields what says which examples of other data sets this one consists of."""
    if isinstance(dataset, Subset):
        yield np.asarray(dataset.indices, dtype=np.int64)
    elif isinstance(dataset, ConcatDataset):
        yield tuple(dataset.cumulative_sizes)
    elif (table := getattr(dataset, "_indices", None)) is not None:  # Hugging Face's `Dataset`
        column = getattr(table, "column", None)
        if callable(column):
            yield np.asarray(column(0), dtype=np.int64)
    if isinstance(dataset, Dataset) and len(outer) < _MOST_PARTS:
        outer = (*outer, id(dataset))
        for part in _attributes(dataset):
            if id(part) not in outer:
                yield from _selections(part, outer)


def _attributes(dataset: Dataset[Any]) -> Iterator[object]:
    """Yields the data sets among a data set's attributes, and in short lists and dicts of these."""
    for value in vars(dataset).values():
        each = value.values() if isinstance(value, dict) else value
        if isinstance(value, list | tuple | dict) and len(value) <= _MOST_PARTS:
            yield from (one for one in each if _is_dataset(one))
        elif _is_dataset(value):
            yield value


def _is_dataset(value: object) -> bool:
    return isinstance(value, Dataset) or "_indices" in getattr(value, "__dict__", ())
