"""The hooks for MLflow and Weights & Biases, with stand-ins for the packages."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import trireme
from recipes.trackers import MLflow, Tracker, WandB
from trireme.errors import ConfigurationError


class FakeMLflow(ModuleType):
    """Notes what is logged."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.calls: list[tuple[Any, ...]] = []
        self.params: dict[str, str] = {}
        self.MlflowClient = lambda: SimpleNamespace(
            get_run=lambda run_id: SimpleNamespace(data=SimpleNamespace(params=self.params))
        )

    def start_run(self, **options: Any) -> Any:
        self.calls.append(("start", options))
        return SimpleNamespace(info=SimpleNamespace(run_id="abc"))

    def log_param(self, name: str, value: Any) -> None:
        self.params[name] = str(value)

    def set_tag(self, name: str, value: Any) -> None:
        self.calls.append(("tag", name, value))

    def log_metrics(self, values: dict[str, float], step: int) -> None:
        self.calls.append(("log", sorted(values), step))

    def end_run(self, status: str) -> None:
        self.calls.append(("end", status))


class FakeWandB(ModuleType):
    """Notes what is logged."""

    id = "xyz"

    def __init__(self) -> None:
        super().__init__("wandb")
        self.calls: list[tuple[Any, ...]] = []
        self.config = self

    def init(self, **options: Any) -> Any:
        self.calls.append(("start", options))
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.calls.append(("define", name, step_metric))

    def update(self, settings: dict[str, Any], allow_val_change: bool) -> None:
        self.calls.append(("config", settings["lr"], settings["data"], allow_val_change))

    def log(self, values: dict[str, float]) -> None:
        self.calls.append(("log", sorted(values), values["global_step"]))

    def finish(self, exit_code: int) -> None:
        self.calls.append(("end", exit_code))


def train(hook: Tracker, run_dir: Path | None, steps: int, *, fails: bool = False) -> None:
    model = nn.Linear(2, 1)
    adam = torch.optim.Adam(model.parameters(), lr=0.5)
    data = torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
    options: Any = {"run_dir": run_dir, "max_steps": steps, "hooks": [hook]}
    with trireme.Session(model, nn.MSELoss(), adam, **options) as session:
        for batch in session.loader(data, 2):
            session.step(batch)
        if fails:
            raise ValueError
        session.evaluate(data)


def test_mlflow_has_one_run_for_all_starts_of_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    train(MLflow(4, tags={"a": "b"}, config={"data": "ones"}), tmp_path, 5)
    assert fake.calls == [
        ("start", {"run_name": tmp_path.name, "tags": {"a": "b"}}),
        ("log", ["loss"], 1),
        ("log", ["loss"], 4),
        ("log", ["validation/loss"], 5),
        ("end", "FINISHED"),
    ]
    assert fake.params["lr"] == "0.5" and fake.params["data"] == "ones"
    assert (tmp_path / "mlflow.id").read_text() == "abc\n"
    fake.calls.clear()
    with pytest.raises(ValueError):
        train(MLflow(4, config={"data": "others"}), tmp_path, 9, fails=True)
    assert fake.calls == [
        ("start", {"run_id": "abc"}),
        ("tag", "resumed/max_steps", 9),
        ("tag", "resumed/data", "others"),
        ("log", ["loss"], 6),
        ("log", ["loss"], 8),
        ("end", "FAILED"),
    ]


def test_wandb_has_one_run_for_all_starts_of_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    train(WandB(4, mode="offline", config={"data": "ones"}), tmp_path, 5)
    assert fake.calls == [
        ("start", {"name": tmp_path.name, "mode": "offline"}),
        ("define", "global_step", None),
        ("define", "*", "global_step"),
        ("config", 0.5, "ones", True),
        ("log", ["global_step", "loss"], 1),
        ("log", ["global_step", "loss"], 4),
        ("log", ["global_step", "validation/loss"], 5),
        ("end", 0),
    ]
    fake.calls.clear()
    train(WandB(4, name="mine", config={"data": "ones"}), tmp_path, 6)
    assert fake.calls[0] == ("start", {"name": "mine", "id": "xyz", "resume": "allow"})


def test_without_a_run_directory_a_run_is_not_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    train(WandB(config={"data": "ones"}), None, 1)
    assert fake.calls[0] == ("start", {"name": None})


def test_only_the_chief_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(trireme.Session, "is_chief", property(lambda self: False))
    train(WandB(1), None, 3)
    assert fake.calls == []


def test_wrong_words_and_missing_packages_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"MLflow\(every=0\): give a whole number"):
        MLflow(0)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigurationError, match="WandB needs the package 'wandb'"):
        train(WandB(), None, 1)
