"""Orders of examples are told apart by a number."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, random_split

from trireme.data.order import Order, fingerprint

DATA = TensorDataset(torch.arange(20))
PLAIN = Order(20)


def test_each_order_has_its_own_and_keeps_it() -> None:
    assert_told_apart(lambda: [Order(20), Order(20, 1), Order(21), Order(20, shuffle=False)])


def assert_told_apart(orders: Callable[[], list[Order]]) -> None:
    found = [fingerprint(order) for order in orders()]
    assert all(one != other for one, other in combinations(found, 2))
    assert all(0 < one <= 2**56 for one in found)
    assert [fingerprint(order) for order in orders()] == found


class Selected(Dataset[int]):
    """A data set with a table of indices, as Hugging Face's."""

    def __init__(self, indices: list[int]) -> None:
        self._indices = type("Table", (), {"column": lambda _, at: indices})()


class Doubled(Dataset[int]):
    """A data set of the program's own, made of others."""

    def __init__(self, *parts: Dataset[Any], itself: bool = False) -> None:
        self.first = parts[0]
        self.others = list(parts[1:])
        self.kept = [self] if itself else []

    def __getitem__(self, index: int) -> int:
        return 2 * self.first[index]


def test_selections_of_examples_are_told_apart() -> None:
    first, second = (
        random_split(DATA, [10, 10], generator=torch.Generator().manual_seed(seed))[0]
        for seed in (0, 1)
    )
    data: list[Dataset[object]] = [
        DATA,
        first,
        second,
        Subset(first, range(5)),
        Subset(second, range(5)),
        Subset(DATA, np.arange(10)),
        ConcatDataset([first, DATA]),
        ConcatDataset([second, DATA]),
        Selected([1, 2]),
        Selected([2, 1]),
        Doubled(Doubled(second, first)),
        Doubled(Doubled(second, second)),
        Doubled(Selected([2, 1, 3])),
    ]
    found = [fingerprint(PLAIN, one) for one in data]
    assert all(one != other for one, other in combinations(found, 2))
    for one in (first, second):
        assert fingerprint(PLAIN, Doubled(one)) == fingerprint(PLAIN, one)
    assert fingerprint(PLAIN, Doubled(first, itself=True)) == fingerprint(PLAIN, Doubled(first))
    assert fingerprint(PLAIN, Subset(DATA, range(10))) == fingerprint(PLAIN, data[5])
