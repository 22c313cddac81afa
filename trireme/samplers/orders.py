"""The orders of samplers and weights: the same for every worker, another each epoch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import suppress
from typing import Any

import torch
from torch.utils.data import DistributedSampler, WeightedRandomSampler

from trireme.data.draws import drawing
from trireme.data.order import Order
from trireme.data.request import Request
from trireme.data.seeds import derive
from trireme.errors import ConfigurationError


def order_of(request: Request, size: int, seed: int) -> Order:
    """Returns the order of weights or a sampler."""
    sampler = request.sampler
    if request.weights is not None:
        sampler = WeightedRandomSampler(_checked(request.weights, size), size)
    assert sampler is not None, "there is one or the other"
    if isinstance(sampler, DistributedSampler):
        raise ConfigurationError(
            "a DistributedSampler deals fixed parts of an epoch to fixed ranks, and repeats some "
            "examples; here each example is dealt once to whichever worker is there. Leave it "
            f"out, and give shuffle={sampler.shuffle}"
        )
    return BatchSamplerOrder(sampler, seed) if request.batched else SamplerOrder(sampler, seed)


def _checked(weights: Sequence[float] | torch.Tensor, size: int) -> Any:
    """Returns the weights of all examples."""
    values = torch.as_tensor(weights, dtype=torch.float64).cpu()
    if len(values) != size:
        raise ConfigurationError(
            f"there are {len(values)} weights and {size} examples: give one for each"
        )
    if not values.isfinite().all() or (values < 0).any() or not values.any():
        raise ConfigurationError(
            "weights must be finite numbers of 0 or more, one for each example, and not all 0"
        )
    return values


class SamplerOrder(Order):
    """The order of a sampler, which is iterated over once for each epoch.

    All random numbers, the sampler's `generator` too, are seeded for it from the seed and the
    epoch; the program's own go on afterwards as if nothing had been drawn.
    """

    def __init__(self, sampler: Iterable[Any], seed: int = 0) -> None:
        size = _length_of(sampler)
        super().__init__(size, seed)
        self.examples = None
        self._sampler, self._checked = sampler, False

    def content(self) -> tuple[Any, ...]:
        """Returns what the order follows from, as far as can be seen: its first epoch."""
        return "sampler", self.size, self._epoch(0).numpy()

    def _build(self, epoch: int) -> torch.Tensor:
        return torch.as_tensor(self._items(epoch), dtype=torch.int64)

    def _items(self, epoch: int) -> list[Any]:
        items = self._iterate(epoch)
        kind = type(self._sampler).__name__
        if len(items) != self.size:
            raise ConfigurationError(
                f"the sampler {kind} says that it has {self.size} entries, and yields "
                f"{len(items)}: it cannot be dealt exactly"
            )
        if not self._checked:
            self._checked = True
            if self._iterate(epoch) != items:
                raise ConfigurationError(
                    f"the sampler {kind} yields another order each time, although the random "
                    "numbers of torch, NumPy and Python are seeded: workers could not agree on "
                    "an order. Draw from one of these, or take `generator`"
                )
        return items

    def _iterate(self, epoch: int) -> list[Any]:
        seed = derive(self.seed, epoch)
        set_epoch = getattr(self._sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        holders = (self._sampler, getattr(self._sampler, "sampler", None))
        own = [getattr(holder, "generator", None) for holder in holders]
        for generator in own:
            if isinstance(generator, torch.Generator):
                generator.manual_seed(seed)
        with drawing() as draw:
            draw(seed)
            return [
                [int(one) for one in item] if isinstance(item, list | tuple) else int(item)
                for item in self._sampler
            ]


class BatchSamplerOrder(SamplerOrder):
    """The order of a batch sampler: each position is one of its batches."""

    batched = True

    def __init__(self, sampler: Iterable[Any], seed: int = 0) -> None:
        super().__init__(sampler, seed)
        self._batches: dict[int, list[list[int]]] = {}

    def content(self) -> tuple[Any, ...]:
        return "batches", self._of(0)

    def indices(self, start: int, stop: int) -> torch.Tensor:
        """Returns the examples of the batches at positions start to stop - 1."""
        found: list[int] = []
        for position in range(start, stop):
            epoch, number = divmod(position, self.size)
            found += self._of(epoch)[number]
        return torch.as_tensor(found, dtype=torch.int64)

    def _of(self, epoch: int) -> list[list[int]]:
        if epoch not in self._batches:
            if len(self._batches) > 1:
                self._batches.pop(min(self._batches))
            self._batches[epoch] = self._items(epoch)
        return self._batches[epoch]


def _length_of(sampler: object) -> int:
    kind = type(sampler).__name__
    size = None
    if isinstance(sampler, Sized) and isinstance(sampler, Iterable):
        with suppress(TypeError, NotImplementedError):
            size = len(sampler)
    if size is None or isinstance(sampler, Iterator):
        raise ConfigurationError(
            f"the sampler {kind} has no length, or can be iterated over only once: examples are "
            "dealt by their place in an epoch, so give a sampler with __len__ and __iter__"
        )
    if size < 1:
        raise ConfigurationError(f"the sampler {kind} has no entries")
    return size
