from __future__ import annotations

import math

import pytest
import torch

from trireme.verification.record import combined, distance, precision, sketch


@pytest.mark.parametrize("size", [1, 5, 4096, 4097, 300_000, 1_200_000])
def test_norms_and_distances_are_estimated(size: int) -> None:
    one = torch.randn(size, generator=torch.Generator().manual_seed(size))
    other = one + 1e-3 * torch.randn(size, generator=torch.Generator().manual_seed(size + 1))
    assert sketch(one).norm == pytest.approx(float(one.norm()), rel=0.6)
    apart = float((one - other).norm())
    assert distance(sketch(one), sketch(other)) == pytest.approx(apart, rel=0.6)
    assert distance(sketch(one), sketch(one.clone())) == 0


def test_one_element_that_differs_is_seen() -> None:
    one = torch.ones(500_000)
    other = one.clone()
    other[417_001] += 1e-3
    assert distance(sketch(one), sketch(other)) == pytest.approx(1e-3, rel=1e-3)


def test_elements_that_change_places_are_seen() -> None:
    one = torch.arange(10_000.0)
    assert distance(sketch(one), sketch(one.flip(0))) > 1000


def test_sketches_add_up_as_tensors_do() -> None:
    a, b = torch.randn(3, 700), torch.randn(3, 700)
    mean = combined((0.25, sketch(a)), (0.75, sketch(b)))
    assert distance(mean, sketch(a.double() / 4 + b.double() * 3 / 4)) < 1e-10


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_the_same_at_the_same_places(number: float) -> None:
    """As in a buffer that holds a causal mask."""
    one = torch.tensor([1.0, number, 2.0])
    assert distance(sketch(one), sketch(one.clone())) == 0
    assert distance(sketch(one), sketch(one + torch.tensor([0.5, 0, 0]))) == pytest.approx(0.5)
    assert distance(sketch(one), sketch(one.flip(0))) < math.inf
    assert distance(sketch(one), sketch(one.roll(1))) == math.inf
    assert distance(sketch(one), sketch(one.nan_to_num(7.0, 7.0, 7.0))) == math.inf
    assert distance(combined((0.5, sketch(one)), (0.5, sketch(one))), sketch(one)) < 1e-12


def test_numbers_that_are_none_and_other_sizes_are_infinitely_far() -> None:
    broken = torch.tensor([1.0, math.nan])
    assert distance(sketch(broken), sketch(torch.ones(2))) == math.inf
    assert distance(sketch(torch.ones(3)), sketch(torch.ones(2))) == math.inf


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_every_real_dtype_has_a_sketch(dtype: torch.dtype) -> None:
    value = torch.tensor([[1, 0], [0, 1]]).to(dtype)
    assert sketch(value).count == 4
    assert (precision(dtype) > 0) == dtype.is_floating_point
