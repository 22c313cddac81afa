"""The batches of a data set for evaluation: each example once, in its own order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from trireme.data.loader import tensors_of
from trireme.data.loading import Loading
from trireme.data.streams import check_one_reader, is_stream
from trireme.errors import ConfigurationError

_OF_ALL = (RandomSampler, WeightedRandomSampler, DistributedSampler, SequentialSampler)
"""The samplers that draw from the whole data set. For an evaluation each example counts once."""


def evaluation_batches(dataset: Any, batch_size: int | None, loading: Loading) -> Iterator[Any]:
    """Iterates over the batches of a data set, each example once."""
    if isinstance(dataset, DataLoader):
        if batch_size is not None or loading != Loading():
            raise ConfigurationError(
                "evaluate(DataLoader, ...): the DataLoader has its batch size and how examples are "
                "loaded: set them there, or give its data set"
            )
        return iter(_again(dataset))
    size = 1000 if batch_size is None else batch_size
    if is_stream(dataset):
        check_one_reader(dataset, loading.num_workers)
        dataset = dataset if isinstance(dataset, IterableDataset) else _Iterated(dataset)
    tensors = tensors_of(dataset) if loading.collate_fn is None else None
    if tensors is not None:
        return zip(*(torch.split(tensor, size) for tensor in tensors), strict=True)
    return iter(DataLoader(dataset, batch_size=size, generator=_apart(), **loading.arguments))


def _again(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Returns a loader like another that leaves nothing out and draws no order."""
    named = Loading.of(loader).arguments
    named |= {"collate_fn": loader.collate_fn, "generator": _apart()}
    if isinstance(loader.dataset, IterableDataset):
        check_one_reader(loader.dataset, loader.num_workers)
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        return DataLoader(loader.dataset, batch_size=loader.batch_size, **named)
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler:
        return DataLoader(loader.dataset, batch_sampler=batches, **named)
    sampler = batches.sampler
    if isinstance(sampler, _OF_ALL):
        sampler = SequentialSampler(loader.dataset)  # type: ignore[arg-type]
    return DataLoader(loader.dataset, batch_size=batches.batch_size, sampler=sampler, **named)


class _Iterated(IterableDataset[Any]):
    """Whatever can be iterated over, as a data set of torch's."""

    def __init__(self, examples: Iterable[Any]) -> None:
        self._examples = examples

    def __iter__(self) -> Iterator[Any]:
        return iter(self._examples)


def _apart() -> torch.Generator:
    """Returns a generator, so that torch's global one is not drawn from."""
    return torch.Generator().manual_seed(0)
