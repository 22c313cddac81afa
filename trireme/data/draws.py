"""The random numbers that data sets draw: those of an example follow from its position alone.

A data set may draw from torch, NumPy and Python's `random` when it is asked for an example, as an
augmentation does. The three are seeded before each example, whichever process fetches it, and the
program's own numbers go on afterwards as if nothing had been drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate, get_worker_info

from trireme.data.seeds import derive

_NUMPY_SEEDS = 1 << 32
_COLLATES = 0x636F6C6C  # keeps these streams apart from those of examples
_DRAWS = 0x64726177

Drawn = tuple[int, int]  # the number of an example, and its position


def seed_all(seed: int) -> None:
    """Seeds the random numbers of torch, on all devices, of NumPy and of `random`."""
    seed_process(seed)
    torch.manual_seed(seed)


def draws_of(seed: int) -> int:
    """Returns the seed of all that a data set draws; `derive` it by the position of an example."""
    return derive(seed, _DRAWS)


@contextmanager
def drawing() -> Iterator[Callable[[int], None]]:
    """Yields a function that seeds the random numbers; restores the program's own afterwards.

    A loader process has none of its own.
    """
    if get_worker_info() is not None:
        yield seed_process
        return
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield seed_process
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])


def seed_process(seed: int) -> None:
    """Seeds the random numbers of torch on the CPU, of NumPy and of `random`."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % _NUMPY_SEEDS)


class DrawingDataset(Dataset[Any]):
    """A data set whose random numbers are seeded before each example.

    A data set that fetches several examples at once, by `__getitems__`, draws for all of them from
    the seed of the first.
    """

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self.dataset = dataset
        self._seed = draws_of(seed)
        innermost: Any = dataset
        while type(innermost) is Subset:  # its `__getitems__` fetches one by one, as a rule
            innermost = innermost.dataset
        self._at_once = callable(getattr(innermost, "__getitems__", None))
        self._never_draws = type(innermost) in (list, tuple, TensorDataset)

    def __getitems__(self, wanted: Sequence[Drawn]) -> Items:
        seeds = [derive(self._seed, position) for _, position in wanted]
        if self._never_draws:
            return Items([self.dataset[index] for index, _ in wanted], seeds[0])
        with drawing() as seed:
            if self._at_once:
                seed(seeds[0])
                indices = [index for index, _ in wanted]
                return Items(self.dataset.__getitems__(indices), seeds[0])  # type: ignore[attr-defined]
            found = []
            for (index, _), own in zip(wanted, seeds, strict=True):
                seed(own)
                found.append(self.dataset[index])
            return Items(found, seeds[0])


class Items(list[Any]):
    """Examples that are to be made a batch, with the seed of the first."""

    def __init__(self, items: Sequence[Any], seed: int) -> None:
        super().__init__(items)
        self.seed = seed


def collated(collate: Callable[[list[Any]], Any], items: list[Any], seed: int) -> Any:
    """Returns a batch, whose random numbers are seeded."""
    if collate is default_collate:
        return collate(items)
    with drawing() as draw:
        draw(derive(seed, _COLLATES))
        return collate(items)


class DrawingCollate:
    """Makes a batch, with random numbers that are seeded by its first example."""

    def __init__(self, collate: Callable[[list[Any]], Any] | None) -> None:
        self._collate = collate or default_collate

    def __call__(self, items: Items) -> Any:
        return collated(self._collate, list(items), items.seed)


class DrawingInit:
    """Begins a loader process: `get_worker_info().dataset` is the program's own data set."""

    def __init__(self, init: Callable[[int], None] | None) -> None:
        self._init = init

    def __call__(self, number: int) -> None:
        info: Any = get_worker_info()
        if info is not None:
            object.__setattr__(info, "dataset", info.dataset.dataset)  # it is frozen
        if self._init is not None:
            self._init(number)
