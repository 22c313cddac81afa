from __future__ import annotations

import math

import pytest
import torch

from trireme.verification.record import (
    Record,
    combined,
    distance,
    joined,
    number,
    precision,
    sketch,
)


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


def test_workers_are_joined_by_their_examples() -> None:
    a, b = torch.randn(10), torch.randn(10)
    records = [
        Record(
            task="worker:1", step=1, weight=3, positions=[1, 2, 3], shapes=["s"], sketches={
                "gradient/w": sketch(b), "examples/contents": sketch(b), "loss/": number(2),
            }, unreached=["k"],
        ),
        Record(
            task="worker:0", step=1, weight=1, positions=[0], shapes=["s"], sketches={
                "gradient/w": sketch(a), "gradient/k": sketch(a), "values/w": sketch(a),
                "gradient/p": sketch(a), "buffers/p": sketch(a),
                "examples/contents": sketch(a), "loss/": number(1),
            },
        ),
    ]  # fmt: skip
    begin = Record(sketches={"values/w": sketch(b), "buffers/p": sketch(b)})
    made = joined({0: [begin], 1: records})[1]
    assert made.positions == [0, 1, 2, 3]
    assert joined({1: [records[0], records[0]]})[1].positions == [1, 2, 3]  # parts of one model
    assert made.shapes == ["s"]
    assert made.sketches["loss/"].size == 1.75
    assert [each.task for each in made.workers] == ["worker:0", "worker:1"]
    for key, expected in {
        "examples/contents": a.double() + b.double(),
        "gradient/w": a.double() / 4 + 3 * b.double() / 4,
        "gradient/k": a.double() / 4,
        "gradient/p": a.double(),  # of a part of the model that the other one has not
        "buffers/p": a.double() - b.double(),
        "values/w": a.double() - b.double(),
    }.items():
        assert made.sketches[key].marks == pytest.approx(sketch(expected).marks)


def test_calls_of_other_shapes_are_not_joined() -> None:
    records = [Record(weight=1, shapes=[each]) for each in ("s", "t")]
    assert joined({1: records})[1].shapes == []
