from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from trireme.verification.compare import STAGES, compare
from trireme.verification.joined import Step, joined
from trireme.verification.record import Record
from trireme.verification.sketch import sketch

EPS = 2.0**-23


def step(number: int, **changed: object) -> Step:
    """A step of two workers whose numbers are all known."""
    generator = torch.Generator().manual_seed(number)
    gradient = torch.randn(100, generator=generator)
    made = Step(
        number,
        (Record(task="worker:0", weight=8), Record(task="worker:1", weight=8)),
        ((16 * number, 16 * number + 16),),
        [[1, 2, 3]],
        [[0.5, 1.5, -0.5]],
        ["[(4,)]"],
        [0.5],
        [{"lr": 0.1}],
        {"w": sketch(gradient)},
        {"w": sketch(gradient)},
        {"mean": sketch(torch.ones(5))},
        {"w": sketch(torch.ones(100) - 0.1 * number * gradient)},
        {"w/momentum": sketch(gradient)},
    )
    return replace(made, **changed)  # type: ignore[arg-type]


def begun(*steps: Step) -> dict[int, Step]:
    begin = Step(0, values={"w": sketch(torch.ones(100))}, buffers={"mean": sketch(torch.ones(5))})
    return {each.number: each for each in (begin, *steps)}


def test_equal_steps_have_no_difference() -> None:
    found = compare(begun(step(1), step(2)), begun(step(1), step(2)))
    assert found.first is None
    assert found.steps == (1, 2)
    assert found.curve == {1: 0.0, 2: 0.0}


@pytest.mark.parametrize(
    ("changed", "stage", "name"),
    [
        ({"spans": ((0, 16),)}, "examples", "positions"),
        ({"examples": [[1, 2, 4]]}, "examples", "contents"),
        ({"marks": [[0.5, 1.5, -0.6]]}, "examples", "contents"),
        ({"losses": [0.5001]}, "loss", "the loss"),
        ({"losses": [math.nan]}, "loss", "the loss"),
        ({"computed": {"w": sketch(torch.ones(100))}}, "gradient", "w"),
        ({"settings": [{"lr": 0.2}]}, "settings", "lr"),
        ({"values": {"w": sketch(torch.full((100,), 1.5))}}, "values", "w"),
        ({"buffers": {"mean": sketch(torch.full((5,), 1.01))}}, "buffers", "mean"),
        ({"state": {"w/momentum": sketch(torch.ones(100))}}, "state", "w/momentum"),
    ],
)
def test_what_differs_is_found_at_its_step(
    changed: dict[str, object], stage: str, name: str
) -> None:
    found = compare(begun(step(1), step(2, **changed)), begun(step(1), step(2)))
    assert found.first is not None
    assert (found.first.step, found.first.stage, found.first.name) == (2, stage, name)
    assert {each.stage for each in found.found} == {stage}


def test_what_is_computed_first_is_named_first() -> None:
    every = {
        "losses": [0.7],
        "settings": [{"lr": 0.2}],
        "values": {"w": sketch(torch.zeros(100))},
    }
    found = compare(begun(step(1, **every)), begun(step(1)))
    stages = [each.stage for each in found.found]
    assert stages == [each for each in STAGES if each in ("loss", "settings", "values")]


def test_examples_that_another_model_has_made_may_differ_in_the_last_place() -> None:
    other = step(1, marks=[[0.5 + 1e-7, 1.5, -0.5]])
    assert compare(begun(other), begun(step(1))).first is None


def test_contents_of_padded_examples_are_not_compared() -> None:
    other = step(1, examples=[[7, 8, 9]], shapes=["[(5,)]"])
    assert compare(begun(other), begun(step(1))).first is None


def test_rounding_is_allowed_and_more_is_not() -> None:
    gradient = torch.randn(100, generator=torch.Generator().manual_seed(1))
    for scale, differs in ((1 + 10 * EPS, False), (1 + 1e-4, True)):
        other = step(1, computed={"w": sketch(gradient.double() * scale)})
        assert (compare(begun(other), begun(step(1))).first is not None) == differs


def test_a_gradient_that_is_nothing_but_rounding_makes_no_difference() -> None:
    """As that of the biases of keys in attention, beside gradients of the usual size."""
    gradient = torch.randn(100, generator=torch.Generator().manual_seed(1))
    noise = {"k": sketch(torch.full((10,), 1e-8)), "w": sketch(gradient)}
    other = {"k": sketch(torch.full((10,), -1e-8)), "w": sketch(gradient)}
    assert compare(begun(step(1, computed=other)), begun(step(1, computed=noise))).first is None


def test_what_rounding_grows_to_is_allowed() -> None:
    """Adam divides by the size of a gradient: rounding alone then moves a value by the rate."""
    apart = {"w": sketch(torch.full((100,), 0.999))}
    grown = {"w": sketch(torch.full((100,), 0.9985))}
    one = {"w": sketch(torch.ones(100))}
    job, reference = begun(step(1, values=apart)), begun(step(1, values=one))
    assert compare(job, reference).first is not None
    assert compare(job, reference, grown=begun(step(1, values=grown))).first is None


def test_the_tolerance_can_be_set() -> None:
    job = begun(step(1, losses=[0.51]))
    assert compare(job, begun(step(1))).first is not None
    assert compare(job, begun(step(1)), tolerance=0.05).first is None


def test_workers_are_joined_by_their_examples() -> None:
    a, b = torch.randn(10), torch.randn(10)
    records = [
        Record(
            task="worker:1", step=1, weight=3, spans=((1, 4),), losses=[2.0],
            examples=[[2, 3, 4]], marks=[[0.1, 0.2, 0.3]], shapes=["s"], computed={"w": sketch(b)},
        ),
        Record(
            task="worker:0", step=1, weight=1, spans=((0, 1),), losses=[1.0],
            examples=[[1]], marks=[[0.0]], shapes=["s"], computed={"w": sketch(a)},
            values={"w": sketch(a)},
        ),
    ]  # fmt: skip
    made = joined({1: records})[1]
    assert made.spans == ((0, 4),)
    assert made.examples == [[1, 2, 3, 4]]
    assert made.marks == [[0.0, 0.1, 0.2, 0.3]]
    assert made.losses == [1.75]
    assert [each.task for each in made.workers] == ["worker:0", "worker:1"]
    mean = sketch(a.double() / 4 + 3 * b.double() / 4)
    assert made.computed["w"].marks == pytest.approx(mean.marks)
    assert "w" in made.values
