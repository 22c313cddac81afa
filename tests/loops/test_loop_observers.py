"""What watches a loop that is not Trireme's: records, curves and messages, as of a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import trireme
from tests.dashboards.test_board import curve
from trireme.loops.batch_watch import BatchWatch
from trireme.loops.distributed_optimizer import DistributedOptimizer
from trireme.records.records import Record, read_starts

Log = Callable[[DistributedOptimizer, torch.Tensor], None]


def train(run_dir: Path, log: Log = lambda optimizer, loss: None) -> list[Record]:
    """Makes ten steps of four examples, and returns the records."""
    model = nn.Linear(3, 2)
    optimizer = trireme.distribute(
        model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=run_dir, log_every=2
    )
    for _ in range(10):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 3)).square().mean()
        loss.backward()
        optimizer.step()
        log(optimizer, loss)
    with torch.no_grad():  # counts nothing
        model(torch.ones(100, 3))
    optimizer.close()
    (start,) = read_starts(run_dir)
    return start.records


def test_a_loop_is_recorded_without_a_line_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = train(tmp_path)[-1].status
    assert (last["step"], last["global_step"], last["applied"]) == (10, 10, 10)
    assert "loss" not in last
    steps = [step for step, _ in curve(tmp_path / "tensorboard", "learning_rate")]
    assert steps == [2, 4, 6, 8, 10]
    assert len(curve(tmp_path / "tensorboard", "speed/examples_per_second")) == 5
    said = capsys.readouterr().out
    assert f"saved {tmp_path}/checkpoints/step-000000010-writer-1" in said
    assert "10 global steps in" in said and "loss" not in said


def test_what_a_loop_logs_is_in_curves_and_records(tmp_path: Path) -> None:
    last = train(tmp_path, lambda optimizer, loss: optimizer.log(loss=loss))[-1].status
    losses = curve(tmp_path / "tensorboard", "loss")
    assert [step for step, _ in losses] == [*range(1, 11)]
    assert last["loss"] == pytest.approx(losses[-2][1])  # logged after the step before


def test_examples_are_counted_as_the_model_is_called_in_training() -> None:
    models = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])  # such as a GAN's
    watch = BatchWatch(models)
    for rows in (4, 3):
        models[0](torch.ones(rows, 3))
    models[1](torch.ones(5, 3))
    with torch.no_grad():
        models[1](torch.ones(100, 3))
    models[1].eval()(torch.ones(100, 3))
    assert watch.take_examples() == 5
    assert watch.take_examples() == 0
    assert len(watch.digests) == 2 and watch.digests[0] != watch.digests[1]
    watch.close()
    models[0](torch.ones(4, 3))
    assert watch.take_examples() == 0


def test_a_module_whose_children_are_called_is_watched_too() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    watch = BatchWatch(model)
    model[1](model[0](torch.ones(4, 3)))  # as a LightningModule's training_step
    assert (watch.take_examples(), len(watch.digests)) == (4, 2)
    for _ in range(2):
        model(torch.ones(4, 3))
    assert watch.take_examples() == 8
    watch.close()
