"""A model that no process ever holds as a whole trains to what one plain process makes of it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.lean import (
    BUILDS,
    evaluate_alone,
    other_batches,
    stop_and_evaluate,
    train_lean,
    wrong_shape,
)
from tests.parity.plain import difference
from tests.parity.spread import STEPS
from tests.process_groups import ProcessGroup, run_process_group
from trireme.session.checkpoint import CheckpointData, latest
from trireme.session.model.module_names import named_parameters

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

CLOSE = 1e-5
TWO = ProcessGroup(2, strategy="graph", microbatches=2)
ONE_PIECE = replace(TWO, microbatches=1)


def trained(
    spread: ProcessGroup, folder: Path, build: str, *args: Any
) -> tuple[list[Any], CheckpointData]:
    """What each process says, and the newest checkpoint."""
    ran = run_process_group(replace(spread, run_dir=folder), train_lean, build, *args)
    found = latest(folder, lambda path, error: pytest.fail(f"{path}: {error}"))
    assert found is not None
    return ran.values, found


def assert_equal(found: CheckpointData, wanted: CheckpointData) -> None:
    """Compares values, moving averages, the optimizer's state, and the examples that were dealt."""
    assert found.step == wanted.step
    for mine, theirs in (
        (found.model, wanted.model),
        (found.average, wanted.average),
        (found.optimizer, wanted.optimizer),
    ):
        assert mine.keys() == theirs.keys()
        assert difference(dict(mine), dict(theirs)) <= CLOSE
    assert all(found.state[name] == wanted.state[name] for name in ("consumed", "sizes"))


@pytest.mark.thorough
@pytest.mark.slow(but=("MLP",))
@pytest.mark.parametrize("build", BUILDS)
def test_it_trains_and_evaluates_as_one_process(build: str, tmp_path: Path) -> None:
    spread = ONE_PIECE if build == "batch normalization" else TWO
    ((_, wanted),), alone = trained(ProcessGroup(), tmp_path / "alone", build, STEPS, True)
    said, together = trained(spread, tmp_path / "graph", build, STEPS, True)
    assert_equal(together, alone)
    for _, found in said:
        assert found == pytest.approx(wanted, abs=1e-5)
    parts = [held for held, _ in said]
    assert all(parts), "each process has a part"
    assert not parts[0].keys() & parts[1].keys()
    everything = {name for name, _ in named_parameters(BUILDS[build][1]())}
    assert parts[0].keys() | parts[1].keys() == everything


@pytest.mark.thorough
def test_two_replicas_of_two_tasks_each(tmp_path: Path) -> None:
    ((_, wanted),), alone = trained(ProcessGroup(), tmp_path / "alone", "MLP", STEPS, True)
    replicas = ProcessGroup(mesh="dp=2,graph=2", inside=4)
    said, together = trained(replicas, tmp_path / "graph", "MLP", STEPS, True, 2)
    assert_equal(together, alone)
    assert all(found == pytest.approx(wanted, abs=1e-5) for _, found in said)


@pytest.mark.thorough
def test_it_is_evaluated_before_the_first_step_and_saved_when_one_asks_to_stop(
    tmp_path: Path,
) -> None:
    spread = replace(TWO, run_dir=tmp_path)
    (one, before, after), other = run_process_group(spread, stop_and_evaluate).values
    assert (one, before, after) == other and after["loss"] < before["loss"]
    saved = latest(tmp_path, lambda path, error: pytest.fail(f"{path}: {error}"))
    assert saved is not None and saved.step == one > 5


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("build", ["LSTM", "tied and frozen"])
def test_resumed_it_goes_on_with_the_same_bits(build: str, tmp_path: Path) -> None:
    _, undisturbed = trained(TWO, tmp_path / "at once", build)
    trained(TWO, tmp_path / "in two", build, STEPS // 2)
    _, resumed = trained(TWO, tmp_path / "in two", build)
    assert resumed.step == STEPS
    for mine, theirs in (
        (resumed.model, undisturbed.model),
        (resumed.average, undisturbed.average),
        (resumed.optimizer, undisturbed.optimizer),
    ):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert resumed.state["consumed"] == undisturbed.state["consumed"]


@pytest.mark.thorough(but=("1",))
@pytest.mark.parametrize("steps", [1, 5])
def test_an_evaluation_of_the_chief_alone_is_refused_at_once(steps: int) -> None:
    """Also after the last step, when the others only wait to leave."""
    began = time.monotonic()
    ran = run_process_group(TWO, evaluate_alone, steps)
    assert time.monotonic() - began < 30
    assert not ran.returned
    assert "every process must call" in ran.raised[1]


def test_an_example_of_another_shape_than_the_batches_is_refused() -> None:
    ran = run_process_group(TWO, wrong_shape)
    assert not ran.returned
    said = [text.splitlines()[-1] for text in ran.raised.values()]
    assert all(
        "does not take these inputs" in last and "all batches must be like it" in last
        for last in said
    )


def test_examples_may_differ_and_batches_may_not() -> None:
    ran = run_process_group(TWO, other_batches)
    assert len(ran.raised) == 2
    assert any("were given different batches" in said for said in ran.raised.values())
