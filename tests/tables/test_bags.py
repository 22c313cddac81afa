"""Gathered rows and sums of bags, with their gradients: as torch's functions compute them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

pytest.importorskip("numba")

import trireme
from trireme.errors import ConfigurationError

IDS = torch.tensor([4, 9, 4, 4, 7, 9, 1, 1, 4, 2, 9, 7])
OFFSETS = torch.tensor([0, 3, 3, 8])
WEIGHTS = torch.linspace(-1.0, 2.0, len(IDS))
PADDING = 9


class Rows:
    """A source of rows that are known: those of a matrix."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self.matrix = torch.randn(10, 3, generator=generator).to(dtype).requires_grad_()
        self.taken: list[tuple[Any, torch.Tensor]] = []

    def rows(self, module: nn.Module, keys: Any) -> torch.Tensor:
        found = self.matrix.detach()[torch.from_numpy(keys)].clone().requires_grad_()
        self.taken.append((keys, found))
        return found

    def gradient(self) -> torch.Tensor:
        whole = torch.zeros_like(self.matrix)
        for keys, rows in self.taken:
            assert rows.grad is not None
            whole[torch.from_numpy(keys)] += rows.grad
        return whole


def compare(
    module: trireme.Embedding | trireme.EmbeddingBag,
    dtype: torch.dtype,
    arguments: tuple[Any, ...],
    expected: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    source = Rows(dtype)
    module.bind(source)
    outputs = module(*arguments)
    factors = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    wanted = expected(source.matrix)
    torch.testing.assert_close(outputs, wanted)
    (outputs * factors).sum().backward()
    (wanted * factors).sum().backward()
    torch.testing.assert_close(source.gradient(), source.matrix.grad)


@pytest.mark.parametrize("padding", [None, PADDING])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(12,), (3, 4), (2, 3, 2)])
def test_rows_are_gathered(shape: tuple[int, ...], dtype: torch.dtype, padding: int | None) -> None:
    ids = IDS.reshape(shape)

    def expected(matrix: torch.Tensor) -> torch.Tensor:
        found = functional.embedding(ids, matrix, padding_idx=padding)
        return found if padding is None else found * (ids != padding)[..., None]

    compare(trireme.Embedding(None, 3, padding, dtype=dtype), dtype, (ids,), expected)


@pytest.mark.parametrize("padding", [None, PADDING])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("form", ["offsets", "last offset", "matrix"])
def test_bags_are_summed(
    form: str, dtype: torch.dtype, weighted: bool, padding: int | None
) -> None:
    ids, weights = IDS, WEIGHTS.to(dtype) if weighted else None
    offsets: torch.Tensor | None = OFFSETS
    last = form == "last offset"
    if last:
        offsets = torch.cat([OFFSETS, torch.tensor([len(IDS)])])
    if form == "matrix":
        ids, offsets = IDS.reshape(4, 3), None
        weights = None if weights is None else weights.reshape(4, 3)

    def expected(matrix: torch.Tensor) -> torch.Tensor:
        return functional.embedding_bag(
            ids,
            matrix,
            offsets,
            mode="sum",
            per_sample_weights=weights,
            include_last_offset=last,
            padding_idx=padding,
        )

    bag = trireme.EmbeddingBag(
        None, 3, mode="sum", padding_idx=padding, dtype=dtype, include_last_offset=last
    )
    compare(bag, dtype, (ids, offsets, weights), expected)


def test_gradients_of_weights_are_torch_s() -> None:
    weights = WEIGHTS.clone().requires_grad_()
    bag = trireme.EmbeddingBag(None, 3, mode="sum")
    bag.bind(Rows(torch.float32))
    bag(IDS, OFFSETS, weights).sum().backward()
    assert weights.grad is not None and weights.grad.abs().min() > 0


@pytest.mark.parametrize(
    "offsets", [[1, 3], [0, 5, 3], [0, 13], [0, -1]], ids=["first", "falling", "beyond", "negative"]
)
def test_offsets_that_do_not_ascend_are_refused(offsets: list[int]) -> None:
    bag = trireme.EmbeddingBag(None, 3, mode="sum")
    bag.bind(Rows(torch.float32))
    with pytest.raises(ConfigurationError, match="do not ascend from 0 to 12"):
        bag(IDS, torch.tensor(offsets))


def test_ids_and_offsets_that_do_not_match_are_refused() -> None:
    bag = trireme.EmbeddingBag(None, 3, mode="sum")
    bag.bind(Rows(torch.float32))
    for ids, offsets in ((IDS, None), (IDS.reshape(3, 4), OFFSETS), (IDS, OFFSETS[None])):
        with pytest.raises(ConfigurationError, match="give ids of shape"):
            bag(ids, offsets)


def test_rows_of_no_batch_are_none() -> None:
    bag = trireme.EmbeddingBag(None, 3, mode="sum")
    bag.bind(Rows(torch.float32))
    assert bag(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)).shape == (0, 3)
    assert bag(torch.empty(2, 0, dtype=torch.int64)).tolist() == [[0.0] * 3] * 2
