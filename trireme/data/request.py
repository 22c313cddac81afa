"""The arguments of a loader, given one by one or taken from a ready `DataLoader`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from trireme.data.loading import Collate, Loading
from trireme.data.order import Order
from trireme.errors import ConfigurationError
from trireme.plugins import Plugins

By = Literal["auto", "position", "shard"]  # a stream's batches or shards; `auto`: shards if any


@dataclass(frozen=True, slots=True)
class OrderType:
    """What orders examples by samplers and weights. Its module should import fast."""

    open: str  # the function (request, size, seed) -> `Order`, as `package.module:function`


ORDERS = Plugins("trireme.orders", "order by", OrderType)  # `samplers` is used


@dataclass(frozen=True, slots=True)
class Request:
    """What a loader is to do."""

    dataset: Any
    batch_size: int
    shuffle: bool | None = None  # each epoch has an order of its own; None: what suits the data set
    sampler: Iterable[Any] | None = None
    weights: Sequence[float] | torch.Tensor | None = None  # by which examples are drawn
    batched: bool = False  # the sampler yields batches, which are dealt whole
    drop_last: bool = False  # the rest of an epoch that makes no full batches is left out
    loading: Loading = Loading()  # noqa: RUF009  # frozen
    seed: int | None = None  # of the order; None for the session's
    by: By = "auto"
    notes: tuple[str, ...] = ()  # what the user should know

    def order(self, size: int, seed: int) -> Order:
        seed = seed if self.seed is None else self.seed
        given = {"shuffle": self.shuffle, "sampler": self.sampler, "weights": self.weights}
        chosen = [name for name, value in given.items() if value is not None]
        if len(chosen) > 1:
            raise ConfigurationError(
                f"{' and '.join(chosen)}: each of them chooses the order of the examples; give one"
            )
        sampler: Any = self.sampler
        if self.weights is None and sampler is None:
            return Order(size, seed, shuffle=self.shuffle is not False)
        own = None if self.batched else getattr(sampler, "generator", None)
        if isinstance(own, torch.Generator):
            seed = own.initial_seed()
        if type(sampler) is SequentialSampler:
            return Order(size, seed, shuffle=False)
        plain = type(sampler) is RandomSampler and not sampler.replacement
        if plain and sampler.num_samples == size:
            return Order(size, seed)
        ordered: Order = ORDERS.imported("samplers", "open")(self, size, seed)
        return ordered


def of_dataloader(loader: DataLoader[Any], by: By = "auto") -> Request:
    """Returns what a ready `DataLoader` asks for: its data set, batches, order and loading."""
    dataset, batches = loader.dataset, loader.batch_sampler
    seed = loader.generator.initial_seed() if loader.generator is not None else None
    request = Request(dataset, 1, loading=Loading.of(loader), seed=seed, by=by)
    if loader.batch_size is None and batches is None:
        single = replace(request.loading, collate_fn=_Single(loader.collate_fn))
        request = replace(request, loading=single)
        stream = isinstance(dataset, IterableDataset)
        return request if stream else _with_sampler(request, loader.sampler)
    if isinstance(dataset, IterableDataset):
        return replace(request, batch_size=loader.batch_size or 1, drop_last=loader.drop_last)
    if isinstance(batches, BatchSampler) and type(batches) is BatchSampler:
        request = replace(request, batch_size=batches.batch_size, drop_last=batches.drop_last)
        return _with_sampler(request, batches.sampler)
    if not isinstance(batches, Iterable):
        raise ConfigurationError(f"the DataLoader's batch_sampler is {batches!r}")
    return replace(request, sampler=batches, batched=True)


def _with_sampler(request: Request, sampler: Any) -> Request:
    if isinstance(sampler, DistributedSampler):
        note = (
            "the DataLoader's DistributedSampler is not used: it deals fixed parts of an epoch to "
            "fixed ranks, and repeats some examples. Trireme deals each example of the data set "
            f"once to whichever worker is there, with shuffle={sampler.shuffle}"
        )
        return replace(request, shuffle=bool(sampler.shuffle), notes=(note,), seed=sampler.seed)
    return replace(request, sampler=sampler)


class _Single:
    """Makes a batch of a list of one item: that item, as a `DataLoader` without batches does."""

    def __init__(self, convert: Collate | Callable[[Any], Any]) -> None:
        self._convert = convert

    def __call__(self, items: list[Any]) -> Any:
        return self._convert(items[0])
