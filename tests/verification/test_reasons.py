from __future__ import annotations

import pytest
import torch
from torch import nn

from trireme.verification.reasons import reason, reason_of_resume
from trireme.verification.record import Record, joined, sketch
from trireme.verification.recorder import layers_of
from trireme.verification.verdict import Difference

ONE, OTHER = torch.randn(2, 50, generator=torch.Generator().manual_seed(3))


def record(worker: int, **values: object) -> Record:
    given = {"weight": 8.0, "line": "train.py:7", **values}
    return Record(task=f"worker:{worker}", step=1, **given)  # type: ignore[arg-type]


def case(stage: str, name: str, *workers: Record, reference: Record | None = None) -> str:
    difference = Difference(1, stage, name, 1.0, 2.0, 1.0, 0.0)
    job = joined({1: workers or (record(0), record(1))})
    return reason(difference, job, joined({1: [reference or record(0)]}))


def test_a_program_that_differs_from_itself_is_said_first() -> None:
    first, again = (Difference(1, each, "", 1, 2, 1, 0) for each in ("examples", "loss"))
    found = reason(first, {}, {}, again)
    assert "differs from its own repetition in one process, from step 1 on (loss)" in found


def test_examples() -> None:
    other = record(0, positions=[0, 1])
    assert "were dealt the examples none" in case("examples", "positions", reference=other)
    assert "makes data of its own" in case("examples", "contents")
    drew = record(0, drew=["loop"])
    assert "the loop draws" in case("examples", "contents", drew, record(1))


def test_draws_of_the_model_and_of_the_loop() -> None:
    for where, words in (("model", "the model draws"), ("loop", "the loop draws")):
        found = case("loss", "", record(0, drew=[where]), record(1))
        assert words in found
        assert words not in case("settings", "lr", record(0, drew=[where]), record(1))


def test_batch_norm() -> None:
    layers = ["BatchNorm2d 1"]
    found = case("loss", "", record(0, layers=layers), record(1, layers=layers))
    assert "BatchNorm2d 1 normalises each worker's batch" in found
    drew = record(0, layers=layers, drew=["loop"])  # as to log something, which hides no cause
    found = case("loss", "", drew, record(1, layers=layers))
    assert "BatchNorm2d 1 normalises each worker's batch" in found


def test_only_layers_that_normalise_by_the_whole_batch_are_blamed() -> None:
    others = [
        nn.InstanceNorm2d(2),
        nn.SyncBatchNorm(2),
        nn.BatchNorm2d(2).eval(),
        nn.GroupNorm(1, 2),
    ]
    model = nn.Sequential(*others, nn.BatchNorm2d(2))
    assert list(layers_of(model)) == ["BatchNorm2d 4"]


@pytest.mark.parametrize("share", [0.25, 0.49])
@pytest.mark.parametrize("weighed", [False, True])
def test_weights_that_are_not_the_numbers_of_examples(weighed: bool, share: float) -> None:
    def worker(index: int, gradient: torch.Tensor) -> Record:
        return record(index, sketches={"gradient/w": sketch(gradient)}, weighed=weighed)

    mean = share * ONE + (1 - share) * OTHER
    one = record(0, sketches={"gradient/w": sketch(mean)})
    text = case("loss", "", worker(0, ONE), worker(1, OTHER), reference=one)
    assert f"worker:0 0.500 in place of {share:.3f}" in text
    assert f"worker:1 0.500 in place of {1 - share:.3f}" in text
    strange = record(0, sketches={"gradient/w": sketch(ONE.flip(0))})
    text = case("loss", "", worker(0, ONE), worker(1, OTHER), reference=strange)
    assert "in place of" not in text


def test_a_parameter_without_a_gradient_on_one_worker() -> None:
    found = case("gradient", "gate", record(0), record(1, unreached=["gate"]))
    assert "gate has no gradient on worker:1" in found
    everywhere = case("gradient", "x", record(0, unreached=["x"]), record(1, unreached=["x"]))
    assert "has no gradient" not in everywhere


def test_hooks_that_are_not_called() -> None:
    found = case("gradient", "w", reference=record(0, hooks=["w"]))
    assert "w has a hook in one process, and none in the job" in found


def test_settings() -> None:
    text = case("settings", "lr")
    assert "lr is 1 in the job and 2 in one process at train.py:7" in text


def test_another_number_of_steps() -> None:
    found = case("steps", "")
    assert "the job ends after 1 steps and one process after 2" in found


def test_gradients_that_the_program_changes() -> None:
    computed = sketch(ONE)
    mine = record(0, sketches={"gradient/w": computed, "pushed/w": sketch(ONE / 3)})
    one = record(0, sketches={"gradient/w": computed, "pushed/w": sketch(ONE / 2)})
    assert "by its own norm" in case("values", "w", mine, mine, reference=one)
    same = case("values", "w", mine, mine, reference=mine)
    assert "what it makes of them does not" in same


def test_buffers() -> None:
    assert "only buffers differ (mean)" in case("buffers", "mean")


@pytest.mark.parametrize("stage", ["loss", "gradient", "state"])
def test_where_no_rule_knows_it_is_said_what_differs(stage: str) -> None:
    assert case(stage, "w")


def test_after_a_resume() -> None:
    for step, words in ((9, "begins anew"), (1, "before the stop")):
        assert words in reason_of_resume(Difference(step, "settings", "lr", 1, 2, 1, 0), 5)
