"""A number by which workers, and a resumed job, notice that they deal examples in other orders."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Subset

from trireme.data.order import Order


def fingerprint(order: Order, dataset: object = None) -> int:
    """Returns a number of 1 to 2**56 that other orders of examples do not have, but by chance.

    It covers which examples a position means: the order, and the indices of a `Subset` (as of
    `random_split`) or of a selection of Hugging Face's `Dataset`, also inside each other. It does
    not cover the examples themselves.

    Raises:
        ConfigurationError: the order is a sampler's that cannot be dealt.
    """
    digest = hashlib.blake2b(digest_size=7)
    for part in (*order.content(), *_selections(dataset)):
        data = part.tobytes() if isinstance(part, np.ndarray) else repr(part).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return 1 + int.from_bytes(digest.digest(), "little")


def _selections(dataset: object) -> Iterator[Any]:
    """Yields what says which examples of other data sets this one consists of."""
    if isinstance(dataset, Subset):
        yield np.asarray(dataset.indices, dtype=np.int64)
        yield from _selections(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        yield tuple(dataset.cumulative_sizes)
        for part in dataset.datasets:
            yield from _selections(part)
    elif (table := getattr(dataset, "_indices", None)) is not None:  # Hugging Face's `Dataset`
        column = getattr(table, "column", None)
        if callable(column):
            yield np.asarray(column(0), dtype=np.int64)
