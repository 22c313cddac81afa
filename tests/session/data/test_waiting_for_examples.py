"""A worker without examples waits for those that others hold, and can be stopped meanwhile."""

from __future__ import annotations

from pathlib import Path
from threading import Event
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.harness import JOB, SECRET, Cluster, run_job
from trireme import Session
from trireme.cluster.member import Observer
from trireme.session.checkpoint import latest
from trireme.session.data.idle_steps import IdleSteps

EXAMPLES, BATCH, PATIENCE = 40, 4, 30.0


@pytest.mark.parametrize("called", ["interrupted", "dismissed"])
def test_a_worker_that_waits_for_the_examples_of_others_ends_when_it_is_to(
    called: str, tmp_path: Path
) -> None:
    """The others wait for its last update before they save."""
    waiter = 1 if called == "dismissed" else 0
    data = TensorDataset(torch.randn(EXAMPLES, 4), torch.randn(EXAMPLES, 2))
    in_hand, waits, left = Event(), Event(), Event()
    pause = IdleSteps._pause

    def make(worker: int) -> Session:
        model = nn.Linear(4, 2)
        return Session(model, nn.MSELoss(), torch.optim.SGD(model.parameters()))

    def pausing(idle: IdleSteps) -> None:
        waits.set()
        pause(idle)

    def program(session: Session) -> None:
        lifecycle = session.worker.lifecycle
        batches = session.loader(data, BATCH, epochs=1)
        if lifecycle.task.index == waiter:
            lifecycle.exits.callback(left.set)
            assert in_hand.wait(PATIENCE)
            for batch in batches:
                session.step(batch)
            return
        for number, batch in enumerate(batches):
            if not number:
                in_hand.set()
                assert waits.wait(PATIENCE)
                if called == "interrupted":
                    lifecycle.interrupt("SIGINT")
                else:
                    Observer(lifecycle.task.coordinator, JOB, SECRET).scale(workers=1)
                    assert left.wait(PATIENCE)
            session.step(batch)

    cluster = Cluster(2, 1, scheme="tcp", run_dir=tmp_path, policy={"elastic": True})
    with mock.patch.object(IdleSteps, "_pause", pausing):
        ran = run_job(cluster, make, program)
    ends = {0: "SystemExit(130)", 1: "SystemExit(130)"} if called == "interrupted" else {}
    assert {worker: repr(error) for worker, error in ran.raised.items()} == ends
    assert ran.over is not None
    assert ran.over.outcome == ("interrupted" if called == "interrupted" else "finished")
    checkpoint = latest(tmp_path, lambda path, error: None)
    assert checkpoint is not None and checkpoint.step > 0
