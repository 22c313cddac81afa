"""The order of examples: complete epochs, the same everywhere, the same for good."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trireme.data.order import Order
from trireme.data.seeds import derive, permutation

GOLDEN_ORDER = [3, 2, 8, 7, 6, 5, 9, 4, 1, 0, 5, 8, 4, 7, 6, 9, 2, 1, 0, 3]
GOLDEN_SEEDS = [
    8147104208329303767,
    5225608189600411232,
    3899408788937973460,
    6345803706357144580,
    3635973705353363870,
]


@given(size=st.integers(1, 200), seed=st.integers(0, 2**63), epoch=st.integers(0, 5))
def test_every_epoch_holds_each_example_once(size: int, seed: int, epoch: int) -> None:
    indices = Order(size, seed).indices(epoch * size, (epoch + 1) * size)
    assert indices.dtype == torch.int64
    assert sorted(indices.tolist()) == list(range(size))


@given(
    size=st.integers(1, 50),
    shuffle=st.booleans(),
    cuts=st.lists(st.integers(1, 120), min_size=1, max_size=8),
)
def test_ranges_join_to_one_sequence(size: int, shuffle: bool, cuts: list[int]) -> None:
    order = Order(size, 7, shuffle)
    pieces, at = [], 0
    for count in cuts:
        pieces.append(order.indices(at, at + count))
        at += count
    assert torch.equal(torch.cat(pieces), Order(size, 7, shuffle).indices(0, at))


def test_going_back_to_an_old_epoch_gives_the_same_examples() -> None:
    order = Order(10, 3)
    first = order.indices(2, 6).tolist()
    for epoch in range(1, 6):
        order.indices(epoch * 10, epoch * 10 + 4)
    assert order.indices(2, 6).tolist() == first


def test_epochs_and_seeds_differ() -> None:
    order = Order(1000, 1)
    one, two = order.indices(0, 1000), order.indices(1000, 2000)
    other = Order(1000, 2).indices(0, 1000)
    for left, right in ((one, two), (one, other), (two, other)):
        # Two unrelated permutations agree in one place on average.
        assert (left == right).sum() < 10
    # Nor is one a shifted copy of the other.
    assert all((one.roll(shift) == two).sum() < 12 for shift in range(1000))


def test_unshuffled_counts_through_each_epoch() -> None:
    assert Order(4, shuffle=False).indices(2, 10).tolist() == [2, 3, 0, 1, 2, 3, 0, 1]


def test_the_order_of_a_seed_never_changes() -> None:
    # Positions are saved in checkpoints: these numbers are part of the format.
    assert Order(10, 0).indices(0, 20).tolist() == GOLDEN_ORDER
    assert [derive(0), derive(1), derive(0, 0), derive(0, 1), derive(1, 0)] == GOLDEN_SEEDS


def test_a_permutation_is_spread_evenly() -> None:
    # Where example 0 stands over many seeds: a chi-squared statistic with 9 degrees of freedom,
    # above 27.9 with probability 0.001. The seeds are fixed, so the test is too.
    counts = [0] * 10
    for seed in range(2000):
        counts[permutation(10, derive(seed)).tolist().index(0)] += 1
    assert sum((count - 200) ** 2 / 200 for count in counts) < 27.9


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 3), (4, 3)])
def test_what_is_no_range_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="not a range of positions"):
        Order(10).indices(start, stop)


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(ValueError, match="0 examples"):
        Order(0)
