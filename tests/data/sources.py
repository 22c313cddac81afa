"""Data sets of every kind, whose examples tell which they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

from trireme.data.streams import STREAMS

Example = tuple[torch.Tensor, torch.Tensor]


def example(number: int) -> Example:
    """An example: its number and a 1 as inputs, and a target."""
    return torch.tensor([float(number), 1.0]), torch.tensor([0.0])


class Rows(Dataset[Example]):
    """Examples by number, made one by one."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Example:
        return example(index)


class Flow(IterableDataset[Example]):
    """Examples one after the other; counts how many were read."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.read = 0

    def __iter__(self) -> Iterator[Example]:
        for number in range(self.size):
            self.read += 1
            yield example(number)


class Resumable(IterableDataset[Example]):
    """Examples one after the other; says where it is, and can go on there.

    `reads` lists the examples that were read, whichever copy has read them.
    """

    def __init__(self, size: int, forgets: int = 0) -> None:
        self.size = size
        self.forgets = forgets
        self.at = 0
        self.reads: list[int] = []

    def __iter__(self) -> Iterator[Example]:
        while self.at < self.size:
            self.at += 1
            self.reads.append(self.at - 1)
            yield example(self.at - 1)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"] + self.forgets


class Sharded(IterableDataset[Example]):
    """Examples in shards of different sizes, one of which is empty."""

    def __init__(self, size: int, of: tuple[int, int] = (1, 0), num_shards: int = 4) -> None:
        self.size = size
        self.of = of
        self.num_shards = num_shards

    def shard(self, num_shards: int, index: int) -> Sharded:
        return Sharded(self.size, (num_shards, index), 1)

    def __iter__(self) -> Iterator[Example]:
        count, index = self.of
        last = max(count - 1, 1)  # the last shard is empty
        low, high = (min(each, last) ** 2 * self.size // last**2 for each in (index, index + 1))
        yield from map(example, range(low, high))


class Unequal(Dataset[list[float]]):
    """Lists of different lengths, which `padded` makes batches of."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> list[float]:
        return [float(index)] * (1 + index % 5)


def padded(items: list[list[float]]) -> dict[str, torch.Tensor]:
    """A batch of lists, padded with -1 to the longest."""
    rows = [torch.tensor(item) for item in items]
    inputs = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1.0)
    return {"inputs": inputs, "targets": inputs[:, :1] * 0}


SIZE = 53
BATCH = 4


def kinds() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Each kind of source by name, with the arguments of `session.loader`."""
    size = {"batch_size": BATCH}
    tensors = TensorDataset(
        *(torch.stack(each) for each in zip(*map(example, range(SIZE)), strict=True))
    )
    streams = {
        "stream": (Flow(SIZE), size),
        "resumable": (Resumable(SIZE), size),
        "shards": (Sharded(SIZE), size),
        "shards by position": (Sharded(SIZE), {**size, "by": "position"}),
    }
    return {
        "tensors": (tensors, size),
        "rows": (Rows(SIZE), size),
        "DataLoader": (DataLoader(Rows(SIZE), BATCH, shuffle=True), {}),
        "shuffled": (Rows(SIZE), {**size, "sampler": RandomSampler(range(SIZE))}),
        **(streams if STREAMS.names() else {}),
    }
