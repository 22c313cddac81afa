"""A checkpoint whose checksums are right and that is not this job's: one error, before training."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import trireme
from tests.harness import Cluster, run_job
from trireme.errors import CheckpointError, Rejected
from trireme.ps.layout import Layout
from trireme.ps.messages import LayoutSpec, ParameterSpec
from trireme.ps.snapshot import ModelState, disassemble
from trireme.session.checkpoint import CheckpointData, latest, list_checkpoints, load, save, verify
from trireme.session.checkpoint.restored import converted, job_state

INPUTS = torch.randn(100, 8, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(INPUTS, (INPUTS.sum(1) > 0).long())
NAN = float("nan")


def session_of(run_dir: Path | None, steps: int) -> trireme.Session:
    return trireme.Session(
        nn.Sequential(nn.Linear(8, 2), nn.BatchNorm1d(2)),
        nn.CrossEntropyLoss(),
        lambda parameters: torch.optim.Adam(parameters, lr=0.1),
        run_dir=run_dir,
        max_steps=steps,
        ema=0.9,
    )


def steps_of(session: trireme.Session) -> int:
    """Trains to the end; returns the step from which it went on."""
    for batch in session.loader(DATA, 10):
        session.step(batch)
    return session.restored_from or 0


def train(run_dir: Path, steps: int) -> int:
    """Trains up to a step, in one process."""
    with session_of(run_dir, steps) as session:
        return steps_of(session)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> CheckpointData:
    run = tmp_path_factory.mktemp("good")
    train(run, 6)
    found = latest(run, lambda path, why: None)
    assert found is not None
    return found


STATES: dict[str, tuple[dict[str, Any], str]] = {
    "a number for the examples": ({"consumed": 5}, r"consumed"),
    "a list for the examples": ({"consumed": [1]}, r"consumed"),
    "NaN for an example": ({"consumed": {"train": [[NAN, 3]]}}, r"consumed"),
    "text for a range": ({"consumed": {"train": ["ab"]}}, r"consumed"),
    "half a range": ({"consumed": {"train": [[1]]}}, r"consumed"),
    "a range that ends first": (
        {"consumed": {"train": [[60, 0]]}},
        r"\[60, 0\) of data set 'train'",
    ),
    "an example below zero": ({"consumed": {"train": [[-5, 60]]}}, r"consumed"),
    "an example beyond all": ({"consumed": {"train": [[0, 1 << 80]]}}, r"consumed"),
    "a list of sizes": ({"sizes": [1]}, r"sizes"),
    "a size that is NaN": ({"sizes": {"train": NAN}}, r"sizes"),
    "a size that is text": ({"sizes": {"train": "x"}}, r"sizes"),
    "a size below zero": ({"sizes": {"train": -5}}, r"sizes"),
    "a number for what it lacks": ({"lacks": 5}, r"lacks"),
    "numbers for what it lacks": ({"lacks": [1, 2]}, r"lacks"),
    "a number for what was applied": ({"applies": 5}, r"applies"),
    "text for the workers": ({"workers": "two"}, r"workers"),
}

TENSORS: dict[str, tuple[str, str, torch.Tensor | None, str]] = {
    "no parameter": ("model", "0.weight", None, "has no parameter '0.weight'"),
    "a parameter's shape": ("model", "0.weight", torch.zeros(8, 2), r"of shape \(8, 2\)"),
    "a parameter of integers": ("model", "0.bias", torch.zeros(2, dtype=torch.int64), "int64"),
    "a buffer that is too small": ("model", "1.running_mean", torch.zeros(1), r"shape \(1,\)"),
    "no average": ("average", "0.weight", None, "has no moving average of '0.weight'"),
    "an average's shape": ("average", "0.weight", torch.zeros(5), r"of shape \(5,\)"),
    "a state's shape": ("optimizer", "0.weight/exp_avg", torch.zeros(3), r"'exp_avg' .* \(3,\)"),
    "a state of integers": (
        "optimizer",
        "0.weight/exp_avg",
        torch.zeros(2, 8, dtype=torch.int64),
        "is of torch.int64",
    ),
    "a state that is missing": ("optimizer", "0.weight/exp_avg_sq", None, "no 'exp_avg_sq'"),
    "a count that is NaN": ("optimizer", "0.weight/step", torch.tensor(NAN), "'step' .* is nan"),
    "a count below zero": ("optimizer", "0.weight/step", torch.tensor(-4.0), "'step' .* is -4.0"),
    "several counts": ("optimizer", "0.weight/step", torch.zeros(4), "not one number"),
    "a count for each element": ("optimizer", "0.weight/step", torch.zeros(2, 8), "not one number"),
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_no_job_saves(tmp_path: Path, good: CheckpointData, name: str) -> None:
    change, said = STATES[name]
    save(tmp_path, replace(good, state={**good.state, **change}))
    with pytest.raises(CheckpointError, match=f"checkpoint of step 6 is not that of a job.*{said}"):
        train(tmp_path, 8)


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_of_another_model_or_optimizer(
    tmp_path: Path, good: CheckpointData, name: str
) -> None:
    group, key, tensor, said = TENSORS[name]
    tensors = dict(getattr(good, group))
    del tensors[key]
    changed = tensors if tensor is None else {**tensors, key: tensor}
    save(tmp_path, replace(good, **{group: changed}))
    with pytest.raises((CheckpointError, Rejected), match=said):
        train(tmp_path, 8)


def test_the_unchanged_one_is_gone_on_from(tmp_path: Path, good: CheckpointData) -> None:
    save(tmp_path, good)
    assert train(tmp_path, 8) == 6


def test_the_counts_of_pushes_go_on_and_their_sequences_do_not(tmp_path: Path) -> None:
    for steps, began in ((6, 0), (10, 6)):
        ran = run_job(
            Cluster(run_dir=tmp_path), partial(lambda n, _: session_of(None, n), steps), steps_of
        )
        assert ran.values == [began]
    data = latest(tmp_path, lambda path, error: pytest.fail(f"{path}: {error}"))
    assert data is not None
    ((worker, incarnation, sequence, applied, stale),) = data.state["pushes"]
    assert (worker, incarnation, sequence, applied, stale) == (0, 1, 4, 10, 0)


def test_what_another_precision_saved_is_converted(tmp_path: Path, good: CheckpointData) -> None:
    save(tmp_path, replace(good, model={n: t.double() for n, t in good.model.items()}))
    assert train(tmp_path, 8) == 6


@pytest.mark.parametrize("tensor", [torch.tensor(NAN), torch.tensor(-1.0), torch.zeros(2, 8)])
def test_servers_get_no_count_that_is_none(tensor: torch.Tensor) -> None:
    layout = Layout(LayoutSpec((ParameterSpec("w", (2, 8), "float32", 0),), (0, 1)))
    state = ModelState(1, {"w": torch.zeros(2, 8)}, optimizer={"w/step": tensor})
    with pytest.raises(CheckpointError, match="'step' of parameter 'w'"):
        disassemble(layout, state, 0)


def test_an_old_state_says_nothing_and_that_is_no_error() -> None:
    state = job_state(CheckpointData(1, {}))
    assert (state.lacks, state.applies, state.workers, state.spans) == ((), "gradients", None, ())


STORED = Path(__file__).parent / "stored"
"""A run of `trireme run --ps 1 --workers 2 --strategy averaging --every 2 --compress int8`.

It was saved before saves were named by their writers, when servers published int8 values.
"""


def test_a_stored_checkpoint_of_an_earlier_version_is_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(STORED, tmp_path, dirs_exist_ok=True)
    (path,) = list_checkpoints(tmp_path)
    verify(path)
    assert {"weight/published", "bias/published"} == set(load(path).optimizer)
    assert converted(load(path)).optimizer == {}
    inputs = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    session = trireme.Session(
        nn.Linear(4, 2),
        nn.CrossEntropyLoss(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        run_dir=tmp_path,
        max_steps=8,
    )
    with session:
        assert torch.equal(session.parameters["weight"], load(path).model["weight"])
        spans = []
        data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
        for batch in session.loader(data, batch_size=4):
            spans += batch.spans
            session.step(batch)
    assert session.restored_from == 6
    assert spans == [(48, 52), (52, 56)]
    assert [path.name for path in list_checkpoints(tmp_path)] == [
        "step-000000006",
        "step-000000008-writer-1",
    ]
