"""Orders by weights and samplers: the same for every worker, another each epoch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from tests.data.sources import Flow, Rows, padded
from trireme.data.request import Request, of_dataloader
from trireme.errors import ConfigurationError
from trireme.samplers.orders import BatchSamplerOrder, SamplerOrder


class Drawn(Sampler[int]):
    """Draws from the given source of random numbers."""

    def __init__(self, draw: Any, size: int = 10, says: int | None = None) -> None:
        self._draw, self._size, self._says = draw, size, says or size

    def __len__(self) -> int:
        return self._says

    def __iter__(self) -> Iterator[int]:
        return iter([self._draw() for _ in range(self._size)])


def test_weights_are_the_probabilities_of_draws() -> None:
    weights, data = torch.tensor([0.0, 1.0, 3.0]).repeat(10_000), range(30_000)
    order, same = (Request(data, 2, weights=weights).order(30_000, 3) for _ in range(2))
    counts = torch.bincount(order.indices(0, 30_000) % 3, minlength=3)
    assert counts[0] == 0 and abs(int(counts[1]) - 7_500) < 400
    assert order.indices(0, 30_000).equal(same.indices(0, 30_000))
    assert not order.indices(0, 99).equal(order.indices(30_000, 30_099))


@pytest.mark.parametrize("weights", [[-1.0, 2.0], [0.0, 0.0], [float("nan"), 1.0]])
def test_weights_that_make_no_sense_are_refused(weights: list[float]) -> None:
    with pytest.raises(ConfigurationError, match="weights must be finite"):
        Request(range(2), 2, weights=weights).order(2, 0)


@pytest.mark.parametrize(
    "draw",
    [lambda: int(torch.randint(99, ())), lambda: random.randrange(99)],
    ids=["torch", "random"],
)
def test_the_order_of_a_sampler_is_the_same_everywhere(draw: Any) -> None:
    before = torch.get_rng_state(), random.getstate()
    one, other = SamplerOrder(Drawn(draw), 7), SamplerOrder(Drawn(draw), 7)
    assert other.indices(20, 30).equal(one.indices(20, 30)), "also if it begins later"
    assert not one.indices(0, 10).equal(one.indices(10, 20))
    assert torch.get_rng_state().equal(before[0]) and random.getstate() == before[1]


def test_samplers_that_cannot_be_dealt_say_so() -> None:
    numbers = iter(range(1000))
    with pytest.raises(ConfigurationError, match="yields another order each time"):
        SamplerOrder(Drawn(lambda: next(numbers))).indices(0, 1)
    with pytest.raises(ConfigurationError, match="says that it has 12 entries, and yields 10"):
        SamplerOrder(Drawn(lambda: 1, says=12)).indices(0, 1)


def test_a_batch_sampler_is_dealt_batch_by_batch() -> None:
    order = BatchSamplerOrder(BatchSampler(SequentialSampler(range(5)), 2, drop_last=False))
    assert order.size == 3
    assert [order.indices(p, p + 1).tolist() for p in range(4)] == [[0, 1], [2, 3], [4], [0, 1]]


ROWS = Rows(9)


@pytest.mark.parametrize(
    ("loader", "examples"),
    [
        (DataLoader(ROWS, 2), list(range(9))),
        (DataLoader(ROWS, 2, sampler=SubsetRandomSampler([4, 7])), [4, 7]),
        (DataLoader(ROWS, 2, sampler=WeightedRandomSampler([0.0] * 8 + [1], 3)), [8, 8, 8]),
        (DataLoader(ROWS, 2, sampler=RandomSampler(ROWS, num_samples=4)), None),
        (DataLoader(ROWS, 2, shuffle=True), list(range(9))),
        (DataLoader(ROWS, batch_sampler=[[0, 1], [5]]), [0, 1, 5]),
    ],
    ids=["sequential", "subset", "weighted", "some", "shuffled", "batches"],
)
def test_a_ready_dataloader_gives_its_order(loader: Any, examples: list[int] | None) -> None:
    order = of_dataloader(loader).order(9, 1)
    found = sorted(order.indices(0, order.size).tolist())
    assert found == examples if examples is not None else len(set(found)) == 4


def test_a_ready_dataloader_gives_its_arguments() -> None:
    generator = torch.Generator().manual_seed(11)
    request = of_dataloader(
        DataLoader(
            ROWS, 3, True, num_workers=1, collate_fn=padded, drop_last=True, generator=generator
        )  # type: ignore[arg-type]
    )
    assert (request.batch_size, request.drop_last, request.seed) == (3, True, 11)
    assert (request.loading.collate_fn, request.loading.num_workers) == (padded, 1)
    assert of_dataloader(DataLoader(Flow(3), 2)).batch_size == 2
    assert of_dataloader(DataLoader(ROWS, 2)).loading.collate_fn is None
    assert of_dataloader(DataLoader(ROWS, batch_size=None)).batch_size == 1


def test_a_distributed_sampler_is_replaced_or_refused() -> None:
    sampler = DistributedSampler(ROWS, 2, 0, shuffle=False)
    request = of_dataloader(DataLoader(ROWS, 2, sampler=sampler))
    assert request.shuffle is False and "DistributedSampler is not used" in request.notes[0]
    with pytest.raises(ConfigurationError, match="fixed parts of an epoch to fixed ranks"):
        Request(ROWS, 2, sampler=sampler).order(9, 0)
