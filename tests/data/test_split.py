"""Splits: disjoint, of the right sizes, the same every time, each class evenly where asked."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, Subset, TensorDataset

from trireme.data.split import indices, split


@given(
    parts=st.lists(st.integers(0, 30), min_size=1, max_size=4),
    spare=st.integers(0, 10),
    seed=st.integers(0, 5),
    classes=st.none() | st.integers(1, 4),
)
def test_parts_are_disjoint_and_of_their_sizes(
    parts: list[int], spare: int, seed: int, classes: int | None
) -> None:
    size = sum(parts) + spare
    labels = None if classes is None else torch.arange(size) % classes
    chosen = indices(size, parts, seed=seed, labels=labels)
    assert [len(part) for part in chosen] == parts
    together = torch.cat(chosen).tolist()
    assert len(set(together)) == len(together)
    assert set(together) <= set(range(size))


@given(size=st.integers(0, 500), shares=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_shares_that_sum_to_one_leave_nobody_out(size: int, shares: list[int]) -> None:
    chosen = indices(size, [share / sum(shares) for share in shares])
    assert sorted(torch.cat(chosen).tolist()) == list(range(size))
    for part, share in zip(chosen, shares, strict=True):
        assert abs(len(part) - size * share / sum(shares)) <= 1


@given(st.lists(st.integers(0, 3), min_size=1, max_size=200), st.integers(0, 3))
def test_classes_are_spread_evenly(classes: list[int], seed: int) -> None:
    labels = torch.tensor(classes)
    half, _ = indices(len(classes), (0.5, 0.5), seed=seed, labels=labels)
    for label in set(classes):
        mine = (labels[half] == label).sum().item()
        assert abs(mine - (labels == label).sum().item() * len(half) / len(classes)) <= 1


def test_tensors_stay_tensors_and_others_become_subsets() -> None:
    class Squares(Dataset[int]):
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> int:
            return index**2

    first, second = split(TensorDataset(torch.arange(10), torch.arange(10) * 2), (6, 4))
    assert isinstance(first, TensorDataset)
    assert torch.equal(first.tensors[1], first.tensors[0] * 2)
    assert sorted([*first.tensors[0].tolist(), *second.tensors[0].tolist()]) == list(range(10))
    part, _ = split(Squares(), (6, 4))
    assert isinstance(part, Subset)
    assert [part[i] for i in range(6)] == [i**2 for i in first.tensors[0].tolist()]


def test_the_seed_decides() -> None:
    one, same, other = (indices(50, (20,), seed=seed)[0].tolist() for seed in (1, 1, 2))
    assert one == same != other


def test_what_cannot_be_is_refused() -> None:
    for parts in ((6, 5), (-1, 5), (0.6, 0.6)):
        with pytest.raises(ValueError, match="cannot take the parts"):
            indices(10, parts)
    with pytest.raises(ValueError, match="10 examples need one each"):
        indices(10, (5,), labels=torch.zeros(9))
