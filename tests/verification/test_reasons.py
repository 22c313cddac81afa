from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from trireme.verification.compare import Comparison, Difference
from trireme.verification.joined import joined
from trireme.verification.reasons import Case, reason, reason_of_resume
from trireme.verification.record import Record
from trireme.verification.sketch import sketch

ONE, OTHER = torch.randn(2, 50, generator=torch.Generator().manual_seed(3))


def record(worker: int, **values: object) -> Record:
    given = {"weight": 8.0, "line": "train.py:7", **values}
    return Record(task=f"worker:{worker}", step=1, **given)  # type: ignore[arg-type]


def case(stage: str, name: str, *workers: Record, reference: Record | None = None) -> Case:
    difference = Difference(1, stage, name, 1.0, 2.0, 1.0, 0.0)
    job = joined({1: workers or (record(0), record(1))})[1]
    one = joined({1: [reference or record(0)]})[1]
    return Case(difference, (difference,), job, one)


def told(found: Case) -> str:
    return reason(found)


def test_a_program_that_differs_from_itself_is_said_first() -> None:
    found = case("examples", "contents")
    again = Comparison((1,), (Difference(1, "loss", "the loss", 1, 2, 1, 0),), {1: 1.0}, 1e-6)
    assert "differs from its own repetition" in told(replace(found, repeated=again))


def test_examples() -> None:
    other = record(0, spans=((0, 8),))
    assert "were dealt the examples none" in told(case("examples", "positions", reference=other))
    assert "makes data of its own" in told(case("examples", "contents"))
    drew = record(0, drew=["loop"])
    assert "the loop draws" in told(case("examples", "contents", drew, record(1)))


def test_draws_of_the_model_and_of_the_loop() -> None:
    for where, words in (("model", "the model draws"), ("loop", "the loop draws")):
        found = case("loss", "the loss", record(0, drew=[where]), record(1))
        assert words in told(found)
        assert words not in told(case("settings", "lr", record(0, drew=[where]), record(1)))


def test_batch_norm() -> None:
    layers = {"1": "BatchNorm2d"}
    found = case("loss", "the loss", record(0, layers=layers), record(1, layers=layers))
    assert "BatchNorm2d 1 normalises each worker's batch" in told(found)


@pytest.mark.parametrize("weighed", [False, True])
def test_weights_that_are_not_the_numbers_of_examples(weighed: bool) -> None:
    def worker(index: int, gradient: torch.Tensor, loss: float) -> Record:
        return record(index, computed={"w": sketch(gradient)}, losses=[loss], weighed=weighed)

    mean = 0.25 * ONE + 0.75 * OTHER
    one = record(0, computed={"w": sketch(mean)}, losses=[0.25 * 1 + 0.75 * 2])
    text = told(case("loss", "the loss", worker(0, ONE, 1), worker(1, OTHER, 2), reference=one))
    assert "worker:0 0.500 in place of 0.250" in text
    assert "worker:1 0.500 in place of 0.750" in text
    strange = record(0, computed={"w": sketch(ONE.flip(0))}, losses=[1.5])
    text = told(case("loss", "the loss", worker(0, ONE, 1), worker(1, OTHER, 2), reference=strange))
    assert "in place of" not in text


def test_a_parameter_without_a_gradient_on_one_worker() -> None:
    found = case("gradient", "gate", record(0), record(1, unreached=["gate"]))
    assert "gate has no gradient on worker:1" in told(found)
    everywhere = case("gradient", "x", record(0, unreached=["x"]), record(1, unreached=["x"]))
    assert "has no gradient" not in told(everywhere)


def test_hooks_that_are_not_called() -> None:
    found = case("gradient", "w", reference=record(0, hooks={"hook of w": 1}))
    assert "hook of w is called in one process, and not in the job" in told(found)


def test_settings() -> None:
    text = told(case("settings", "lr"))
    assert "lr is 1 in the job and 2 in one process at train.py:7" in text


def test_gradients_that_the_program_changes() -> None:
    computed = {"w": sketch(ONE)}
    mine = record(0, computed=computed, pushed={"w": sketch(ONE / 3)})
    one = record(0, computed=computed, pushed={"w": sketch(ONE / 2)})
    assert "by its own norm" in told(case("values", "w", mine, mine, reference=one))
    same = told(case("values", "w", mine, mine, reference=mine))
    assert "what it makes of them does not" in same


def test_updates_below_the_last_place() -> None:
    mine = record(0, unmoved={"w": 0.9})
    assert "90% of the elements of w" in told(case("values", "w", mine, record(1)))


def test_buffers() -> None:
    assert "only buffers differ (mean)" in told(case("buffers", "mean"))


@pytest.mark.parametrize("stage", ["loss", "gradient", "state"])
def test_where_no_rule_knows_it_is_said_what_differs(stage: str) -> None:
    assert told(case(stage, "w"))


def test_after_a_resume() -> None:
    found = case("settings", "lr")
    later = replace(found, first=replace(found.first, step=9))
    assert "begins anew" in reason_of_resume(later, 5)
    assert "before the stop" in reason_of_resume(found, 5)
