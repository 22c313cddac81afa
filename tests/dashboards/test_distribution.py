from __future__ import annotations

import math

import pytest
import torch

from trireme.dashboards.distribution import BINS, distribution_of


def test_moments_and_ranges_are_those_of_the_values() -> None:
    values = torch.randn(50, 40, generator=torch.Generator().manual_seed(0)) * 3 + 100
    found = distribution_of(values)
    assert found is not None
    exact = values.double()
    assert found[:4] == pytest.approx(
        (
            *(values.min().item(), values.max().item()),
            *(exact.mean().item(), exact.std(correction=0).item()),
        ),
        rel=1e-6,
    )
    assert sum(found.counts) == found.total == 2000
    assert len(found.counts) == BINS
    width = (found.high - found.low) / BINS
    below = [(values <= found.low + width * (1 + place)).sum().item() for place in range(BINS)]
    for have, want in zip(torch.tensor(found.counts).cumsum(0).tolist(), below, strict=True):
        assert abs(have - want) <= 1  # values on the edge of a range


@pytest.mark.parametrize("layout", ["channels_last", "transposed", "every other"])
def test_how_values_lie_in_memory_does_not_matter(layout: str) -> None:
    values = torch.arange(2 * 4 * 6 * 8, dtype=torch.float32).view(2, 4, 6, 8)
    changed = {
        "channels_last": values.to(memory_format=torch.channels_last),
        "transposed": values.transpose(1, 3),
        "every other": torch.stack([values, values], -1).flatten(3)[..., ::2],
    }[layout]
    assert not changed.is_contiguous()
    assert distribution_of(changed) == distribution_of(values)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64])
def test_any_dtype(dtype: torch.dtype) -> None:
    found = distribution_of(torch.tensor([1, 2, 3, 6], dtype=dtype))
    assert found is not None
    assert (found.mean, found.low, found.high) == (3, 1, 6)


def test_one_value_is_one_range() -> None:
    found = distribution_of(torch.full((3,), 7.0))
    assert found is not None
    assert (found.high, found.counts, found.deviation) == (7.0, (3.0,), 0.0)


def test_what_is_not_finite_is_counted_and_left_out() -> None:
    found = distribution_of(torch.tensor([1.0, math.nan, 3.0, math.inf, -math.inf]))
    assert found is not None
    assert (found.total, found.infinite, found.mean) == (2, 3, 2.0)
    assert distribution_of(torch.tensor([math.nan])) is None
    assert distribution_of(torch.zeros(0)) is None


def test_values_of_millions_keep_their_deviation() -> None:
    values = 1000 + torch.randn(3_000_000, generator=torch.Generator().manual_seed(1)) / 100
    found = distribution_of(values)
    assert found is not None
    assert found.deviation == pytest.approx(values.double().std().item(), rel=1e-3)
