"""MLflow and Weights & Biases themselves have one run for all starts of a job."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import trireme
from recipes.trackers import MLflow, WandB

pytestmark = [pytest.mark.recipes, pytest.mark.thorough]
DATA = TensorDataset(torch.ones(8, 2), torch.ones(8, 1))


def train(hook: trireme.Hook, run_dir: Path, steps: int, *, fails: bool = False) -> None:
    model = nn.Linear(2, 1)
    adam = torch.optim.Adam(model.parameters(), lr=0.5)
    session = trireme.Session(
        model, nn.MSELoss(), adam, run_dir=run_dir, max_steps=steps, hooks=[hook]
    )
    with session:
        for batch in session.loader(DATA, 2):
            session.step(batch)
        if fails:
            raise ValueError


def test_mlflow_goes_on_with_its_run(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="NOT TESTED: no MLflow: make test-recipes")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    train(MLflow(4), tmp_path / "run", 5)
    with pytest.raises(ValueError):
        train(MLflow(4), tmp_path / "run", 9, fails=True)
    client = mlflow.MlflowClient()
    (run,) = client.search_runs(["0"])
    assert run.info.status == "FAILED" and run.data.params["max_steps"] == "5"
    assert run.data.tags["resumed/max_steps"] == "9"
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [point.step for point in history] == [1, 4, 6, 8]


def test_wandb_goes_on_with_its_run(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb", reason="NOT TESTED: no wandb: make test-recipes")
    for steps in (5, 9):
        train(WandB(4, mode="offline", dir=str(tmp_path)), tmp_path / "run", steps)
    wandb.teardown()  # its service is a process of its own
    run_id = (tmp_path / "run" / "wandb.id").read_text().strip()
    folders = list((tmp_path / "wandb").glob("offline-run-*"))
    # offline-run-DATE_TIME-ID, and -1 behind it where both began within one second.
    assert [folder.name.split("-")[3] for folder in folders] == [run_id, run_id]
