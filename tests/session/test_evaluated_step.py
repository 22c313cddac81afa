"""An evaluation has the label of the values that were evaluated, wherever servers have gone on."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import torch
from torch.utils.data import TensorDataset

from tests.harness import SECONDS, Cluster, run_job
from trireme.session.hooks import Hook
from trireme.session.session import Session

ONES = (torch.ones(1, 1), torch.zeros(1, 1))


class Steps(Hook):
    """Keeps the step that each evaluation is said to be of."""

    def __init__(self) -> None:
        self.seen: list[int | None] = []

    def on_evaluate(self, session: Session, name: str, metrics: Mapping[str, float]) -> None:
        self.seen.append(session.evaluated_step)


def test_the_label_is_the_step_of_the_values_that_the_servers_had(tmp_path: Path) -> None:
    # The gradient is 1 always, so that a step takes 1 from the weight: the loss tells the step.
    hooks = [Steps(), Steps()]
    chief_has_stepped, other_has_stepped = threading.Event(), threading.Event()

    def make(index: int) -> Session:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(model.weight, 100.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        return Session(model, lambda outputs, _: outputs.mean(), optimizer, hooks=[hooks[index]])

    def program(session: Session) -> None:
        if not session.is_chief:
            assert chief_has_stepped.wait(SECONDS)
            for _ in range(5):
                session.step(ONES)
            other_has_stepped.set()
            return
        session.step(ONES)
        chief_has_stepped.set()
        assert other_has_stepped.wait(SECONDS)
        with (
            mock.patch.object(session.worker.progress, "message") as message,
            mock.patch.object(session.recorder, "log") as log,
        ):
            loss = session.evaluate(TensorDataset(*ONES))["loss"]
        step = round(100 - loss)
        assert (step, session.global_step) == (6, 1)
        assert session.evaluated_step == step
        assert message.call_args.args[0].startswith(f"validation at global step {step}:")
        assert log.call_args.args[2] == step

    assert run_job(Cluster(2, 1, "async", run_dir=tmp_path / "run"), make, program).values
    assert hooks[0].seen == [6]
