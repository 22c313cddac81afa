"""Buffers of several workers: what the model has at the end is what is evaluated and saved."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import trireme
from tests.harness import Cluster, run_job
from tests.process_groups import ProcessGroup, run_process_group
from trireme.session.checkpoint import latest, list_checkpoints, load
from trireme.session.session import Session

INPUTS = torch.randn(96, 4, generator=torch.Generator().manual_seed(0)) * 3 + 1
DATA = TensorDataset(INPUTS, INPUTS.sum(1, keepdim=True))


@pytest.mark.parametrize("every", [None, 3], ids=["at the end", "also when it is due there"])
def test_every_model_has_the_mean_at_the_end(tmp_path: Path, every: int | None) -> None:
    def make(index: int) -> Session:
        torch.manual_seed(0)
        return Session(
            nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)),
            nn.MSELoss(),
            lambda parameters: torch.optim.SGD(parameters, lr=0.01),
            max_steps=6,
            run_dir=tmp_path,
            checkpoint=trireme.Checkpoint(every_seconds=None, every_steps=every),
        )

    def program(session: Session) -> tuple[dict[str, torch.Tensor], float, float]:
        for batch in session.loader(DATA, 8):
            session.step(batch)
        kept = {name: b.clone() for name, b in session.model.named_buffers()}
        session.model.eval()
        with torch.no_grad():
            own = float(nn.functional.mse_loss(session.model(DATA.tensors[0]), DATA.tensors[1]))
        session.model.train()
        return kept, own, session.evaluate(DATA)["loss"]

    cluster = Cluster(workers=2, servers=1, strategy="sync", run_dir=tmp_path)
    (one, own, found), (other, _, _) = run_job(cluster, make, program).values
    saved = latest(tmp_path, lambda path, error: None)
    assert saved is not None
    for name in ("0.running_mean", "0.running_var"):
        assert torch.equal(one[name], saved.model[name]), name
        assert torch.equal(one[name], other[name]), name
    assert own == pytest.approx(found, rel=1e-5)


def saves(run_dir: Path) -> dict[int, torch.Tensor]:
    torch.manual_seed(0)
    session = Session(
        nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)),
        nn.MSELoss(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        max_steps=4,
        run_dir=run_dir,
        checkpoint=trireme.Checkpoint(every_seconds=None, every_steps=2),
    )
    own: dict[int, torch.Tensor] = {}
    with session:
        norm = session.model[0]
        assert isinstance(norm, nn.BatchNorm1d) and norm.running_mean is not None
        for batch in session.loader(DATA, 8):
            session.step(batch)
            own[session.global_step] = norm.running_mean.clone()
    return own


def test_without_servers_a_checkpoint_has_the_mean_of_its_step(tmp_path: Path) -> None:
    group = ProcessGroup(workers=2)
    one, other = run_process_group(group, partial(saves, tmp_path)).values
    checkpoints = {data.step: data.model for data in map(load, list_checkpoints(tmp_path))}
    assert sorted(checkpoints) == [2, 4]
    for step, model in checkpoints.items():
        assert not torch.equal(one[step], other[step])
        torch.testing.assert_close(model["0.running_mean"], (one[step] + other[step]) / 2)


def evaluations() -> tuple[float, list[float], list[float]]:
    torch.manual_seed(0)
    session = Session(
        nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)),
        nn.MSELoss(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        max_steps=3,
    )
    with session:
        for batch in session.loader(DATA, 8):
            session.step(batch)
            if session.global_step == 2:
                break
        norm = session.model[0]
        assert isinstance(norm, nn.BatchNorm1d) and norm.running_mean is not None
        before = norm.running_mean.tolist()
        session.evaluate(DATA)
        session.worker.backend.mean({"all have evaluated": 1.0}, counts=False)
        return session.evaluate(DATA)["loss"], before, norm.running_mean.tolist()


def test_without_servers_an_evaluation_has_the_mean_and_training_goes_on_with_its_own() -> None:
    group = ProcessGroup(workers=2)
    (one, before, after), (other, its, _) = run_process_group(group, evaluations).values
    assert one == other
    assert before == after != its
