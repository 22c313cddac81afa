from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from trireme.verification.compare import Comparison, Difference
from trireme.verification.reasons import Case, reason, reason_of_resume
from trireme.verification.record import Record, joined
from trireme.verification.recorder import layers_of
from trireme.verification.sketch import sketch

ONE, OTHER = torch.randn(2, 50, generator=torch.Generator().manual_seed(3))


def record(worker: int, **values: object) -> Record:
    given = {"weight": 8.0, "line": "train.py:7", **values}
    return Record(task=f"worker:{worker}", step=1, **given)  # type: ignore[arg-type]


def case(stage: str, name: str, *workers: Record, reference: Record | None = None) -> Case:
    difference = Difference(1, stage, name, 1.0, 2.0, 1.0, 0.0)
    job = joined({1: workers or (record(0), record(1))})[1]
    one = joined({1: [reference or record(0)]})[1]
    return Case(difference, job, one)


def test_a_program_that_differs_from_itself_is_said_first() -> None:
    found = case("examples", "contents")
    again = Comparison((1,), (Difference(1, "loss", "the loss", 1, 2, 1, 0),), {1: 1.0}, 1e-6)
    assert "differs from its own repetition" in reason(replace(found, repeated=again))


def test_examples() -> None:
    other = record(0, positions=[0, 1])
    assert "were dealt the examples none" in reason(case("examples", "positions", reference=other))
    assert "makes data of its own" in reason(case("examples", "contents"))
    drew = record(0, drew=["loop"])
    assert "the loop draws" in reason(case("examples", "contents", drew, record(1)))


def test_draws_of_the_model_and_of_the_loop() -> None:
    for where, words in (("model", "the model draws"), ("loop", "the loop draws")):
        found = case("loss", "the loss", record(0, drew=[where]), record(1))
        assert words in reason(found)
        assert words not in reason(case("settings", "lr", record(0, drew=[where]), record(1)))


def test_batch_norm() -> None:
    layers = {"1": "BatchNorm2d"}
    found = case("loss", "the loss", record(0, layers=layers), record(1, layers=layers))
    assert "BatchNorm2d 1 normalises each worker's batch" in reason(found)
    drew = record(0, layers=layers, drew=["loop"])  # as to log something, which hides no cause
    found = case("loss", "the loss", drew, record(1, layers=layers))
    assert "BatchNorm2d 1 normalises each worker's batch" in reason(found)


def test_only_layers_that_normalise_by_the_whole_batch_are_blamed() -> None:
    others = [
        nn.InstanceNorm2d(2),
        nn.SyncBatchNorm(2),
        nn.BatchNorm2d(2).eval(),
        nn.GroupNorm(1, 2),
    ]
    model = nn.Sequential(*others, nn.BatchNorm2d(2))
    assert dict(layers_of(model)) == {"4": "BatchNorm2d"}


@pytest.mark.parametrize("weighed", [False, True])
def test_weights_that_are_not_the_numbers_of_examples(weighed: bool) -> None:
    def worker(index: int, gradient: torch.Tensor, loss: float) -> Record:
        return record(
            index, tensors={"gradient/w": sketch(gradient)}, losses=[loss], weighed=weighed
        )

    mean = 0.25 * ONE + 0.75 * OTHER
    one = record(0, tensors={"gradient/w": sketch(mean)}, losses=[0.25 * 1 + 0.75 * 2])
    text = reason(case("loss", "the loss", worker(0, ONE, 1), worker(1, OTHER, 2), reference=one))
    assert "worker:0 0.500 in place of 0.250" in text
    assert "worker:1 0.500 in place of 0.750" in text
    strange = record(0, tensors={"gradient/w": sketch(ONE.flip(0))}, losses=[1.5])
    text = reason(
        case("loss", "the loss", worker(0, ONE, 1), worker(1, OTHER, 2), reference=strange)
    )
    assert "in place of" not in text


def test_a_parameter_without_a_gradient_on_one_worker() -> None:
    found = case("gradient", "gate", record(0), record(1, unreached=["gate"]))
    assert "gate has no gradient on worker:1" in reason(found)
    everywhere = case("gradient", "x", record(0, unreached=["x"]), record(1, unreached=["x"]))
    assert "has no gradient" not in reason(everywhere)


def test_hooks_that_are_not_called() -> None:
    found = case("gradient", "w", reference=record(0, hooks=["w"]))
    assert "w has a hook in one process, and none in the job" in reason(found)


def test_settings() -> None:
    text = reason(case("settings", "lr"))
    assert "lr is 1 in the job and 2 in one process at train.py:7" in text


def test_another_number_of_steps() -> None:
    found = reason(case("steps", ""))
    assert "the job ends after 1 steps and one process after 2" in found


def test_gradients_that_the_program_changes() -> None:
    computed = sketch(ONE)
    mine = record(0, tensors={"gradient/w": computed, "pushed/w": sketch(ONE / 3)})
    one = record(0, tensors={"gradient/w": computed, "pushed/w": sketch(ONE / 2)})
    assert "by its own norm" in reason(case("values", "w", mine, mine, reference=one))
    same = reason(case("values", "w", mine, mine, reference=mine))
    assert "what it makes of them does not" in same


def test_buffers() -> None:
    assert "only buffers differ (mean)" in reason(case("buffers", "mean"))


@pytest.mark.parametrize("stage", ["loss", "gradient", "state"])
def test_where_no_rule_knows_it_is_said_what_differs(stage: str) -> None:
    assert reason(case(stage, "w"))


def test_after_a_resume() -> None:
    found = case("settings", "lr")
    later = replace(found, first=replace(found.first, step=9))
    assert "begins anew" in reason_of_resume(later, 5)
    assert "before the stop" in reason_of_resume(found, 5)
