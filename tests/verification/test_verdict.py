from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from trireme.verification.record import Record, number, sketch
from trireme.verification.verdict import compare

EPS = 2.0**-23


def step(place: int, **changed: Any) -> Record:
    """A step of two workers whose numbers are all known; values and buffers are movements."""
    generator = torch.Generator().manual_seed(place)
    gradient = torch.randn(100, generator=generator)
    tensors: dict[str, Any] = {
        "gradient/w": gradient,
        "pushed/w": gradient,
        "buffers/mean": torch.ones(5),
        "values/w": -0.1 * place * gradient,
        "state/w/momentum": gradient,
        "examples/contents": torch.tensor([0.5, 1.5, -0.5]),
        "loss/": 0.5,
        "settings/lr": 0.1,
        **{name: each for name, each in changed.items() if "/" in name},
    }
    given = {
        "positions": [16 * place + each for each in range(16)],
        "shapes": ["[(4,)]"],
        "eps": EPS,
        **{name: each for name, each in changed.items() if "/" not in name},
    }
    sketches = {
        name: sketch(each) if isinstance(each, torch.Tensor) else number(each)
        for name, each in tensors.items()
        if each is not None
    }
    return Record(step=place, weight=16, sketches=sketches, **given)  # type: ignore[arg-type]


def begun(*steps: Record) -> dict[int, Record]:
    return {each.step: each for each in (Record(), *steps)}


def test_equal_steps_have_no_difference() -> None:
    found = compare(begun(step(1), step(2)), begun(step(1), step(2)))
    assert found.first is None
    assert found.steps == (1, 2)
    assert found.curve == {1: 0.0, 2: 0.0}


@pytest.mark.parametrize(
    ("changed", "stage", "name"),
    [
        ({"examples/contents": torch.tensor([0.5, 1.5, -0.6])}, "examples", "contents"),
        ({"loss/": 0.5001}, "loss", ""),
        ({"loss/": math.nan}, "loss", ""),
        ({"gradient/w": torch.ones(100)}, "gradient", "w"),
        ({"settings/lr": 0.2}, "settings", "lr"),
        ({"settings/lr of group 1": 0.1}, "settings", "lr of group 1"),
        ({"settings/lr": None}, "settings", "lr"),
        ({"values/w": torch.full((100,), 1.5)}, "values", "w"),
        ({"buffers/mean": torch.full((5,), 1.01)}, "buffers", "mean"),
        ({"state/w/momentum": torch.ones(100)}, "state", "w/momentum"),
    ],
)
def test_what_differs_is_found_at_its_step(
    changed: dict[str, object], stage: str, name: str
) -> None:
    found = compare(begun(step(1), step(2, **changed)), begun(step(1), step(2)))
    assert found.first is not None
    assert (found.first.step, found.first.stage, found.first.name) == (2, stage, name)


def test_another_number_of_steps_is_a_difference() -> None:
    found = compare(begun(step(1)), begun(step(1), step(2)))
    assert found.first is not None
    assert (found.first.step, found.first.stage) == (2, "steps")
    assert (found.first.job, found.first.reference) == (1, 2)


def test_numbers_that_are_not_finite_in_both_runs_are_the_same() -> None:
    broken = torch.tensor([1.0, math.nan, math.inf])
    one = {"loss/": math.nan, "gradient/w": broken, "values/w": broken, "settings/m": math.inf}
    assert compare(begun(step(1, **one)), begun(step(1, **one))).first is None
    assert compare(begun(step(1)), begun(step(1, **{"loss/": math.nan}))).first is not None


@pytest.mark.parametrize(("eps", "scale", "differs"), [(2**-7, 1.01, False), (2**-7, 1.5, True)])
def test_what_is_computed_in_bfloat16_may_differ_more_but_not_by_half(
    eps: float, scale: float, differs: bool
) -> None:
    """Whether parameters are bfloat16, or float32 under autocast."""
    gradient = torch.randn(100, generator=torch.Generator().manual_seed(1))
    job = step(1, **{"gradient/w": scale * gradient}, eps=eps)
    assert (compare(begun(job), begun(step(1, eps=eps))).first is not None) == differs


def test_what_is_computed_first_is_named_first() -> None:
    every = {"values/w": torch.zeros(100), "settings/lr": 0.2, "loss/": 0.7}
    for stage in ("loss", "settings", "values"):
        found = compare(begun(step(1, **every)), begun(step(1))).first
        assert found is not None and found.stage == stage
        every.popitem()


def test_examples_that_another_model_has_made_may_differ_in_the_last_place() -> None:
    other = step(1, **{"examples/contents": torch.tensor([0.5 + 1e-7, 1.5, -0.5])})
    assert compare(begun(other), begun(step(1))).first is None


def test_contents_of_padded_examples_are_not_compared() -> None:
    other = step(1, shapes=["[(5,)]"], **{"examples/contents": torch.tensor([7.0, 8.0, 9.0])})
    assert compare(begun(other), begun(step(1))).first is None


def test_rounding_is_allowed_and_more_is_not() -> None:
    gradient = torch.randn(100, generator=torch.Generator().manual_seed(1))
    for scale, differs in ((1 + 10 * EPS, False), (1 + 1e-4, True)):
        other = step(1, **{"gradient/w": gradient.double() * scale})
        assert (compare(begun(other), begun(step(1))).first is not None) == differs


def test_a_gradient_that_is_nothing_but_rounding_makes_no_difference() -> None:
    """As that of the biases of keys in attention, beside gradients of the usual size."""
    gradient = torch.randn(100, generator=torch.Generator().manual_seed(1))
    noise, other = torch.full((10,), 1e-8), torch.full((10,), -1e-8)
    job, reference = (step(1, **{"gradient/k": k, "gradient/w": gradient}) for k in (noise, other))
    assert compare(begun(job), begun(reference)).first is None


def test_what_rounding_grows_to_is_allowed() -> None:
    """Adam divides by the size of a gradient: rounding alone then moves a value by the rate."""
    job, reference, grown = (
        begun(step(1, **{"values/w": torch.full((100,), value)})) for value in (1.0, 1.001, 1.0015)
    )
    assert compare(job, reference).first is not None
    assert compare(job, reference, grown=[grown]).first is None


def test_examples_that_differ_in_each_run_are_not_taken_for_rounding() -> None:
    job, reference, grown = (
        begun(step(1, **{"examples/contents": torch.full((3,), value), "loss/": value}))
        for value in (1.0, 2.0, 3.0)
    )
    found = compare(job, reference, grown=[grown]).first
    assert found is not None and found.stage == "examples"


def test_the_tolerance_can_be_set() -> None:
    job = begun(step(1, **{"loss/": 0.51}))
    assert compare(job, begun(step(1))).first is not None
    assert compare(job, begun(step(1)), tolerance=0.05).first is None
