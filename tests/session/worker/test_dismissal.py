"""A worker that the job needs no more makes its last update, and leaves."""

from __future__ import annotations

import time

import pytest
import torch
from torch.utils.data import TensorDataset

from tests.harness import JOB, SECRET, Cluster, run_job
from trireme import Applied, Session
from trireme.cluster.member import Observer
from trireme.errors import ConfigurationError

EVERY, STEPS = 4, 40


@pytest.mark.parametrize(
    ("strategy", "last"), [("averaging", EVERY), ("async", 2)], ids=["averaging", "async"]
)
def test_a_worker_leaves_once_all_that_it_has_learned_is_in_the_values(
    strategy: str, last: int
) -> None:
    data = TensorDataset(torch.randn(64, 4), torch.randn(64, 2))

    def make(worker: int) -> Session:
        model = torch.nn.Linear(4, 2)
        return Session(
            model, torch.nn.MSELoss(), torch.optim.SGD(model.parameters()), max_steps=STEPS
        )

    def program(session: Session) -> list[bool]:
        verdicts = []
        lifecycle = session.worker.lifecycle
        for number, batch in enumerate(session.loader(data, batch_size=4), 1):
            if lifecycle.task.index == 1 and number == 2:
                Observer(lifecycle.task.coordinator, JOB, SECRET).scale(workers=1)
                deadline = time.monotonic() + 10
                while lifecycle.dismissed is None:
                    assert time.monotonic() < deadline
                    time.sleep(0.001)
            verdicts.append(isinstance(session.step(batch).verdict, Applied))
        return verdicts

    every = EVERY if strategy == "averaging" else None
    cluster = Cluster(2, 1, strategy=strategy, every=every, scheme="tcp", policy={"elastic": True})
    ran = run_job(cluster, make, program)
    chief, leaver = ran.values
    assert (len(leaver), leaver[-1]) == (last, True)
    assert len(chief) > last
    assert ran.over is not None and ran.over.outcome == "finished"


def test_with_prefetch_a_worker_leaves_a_loop_that_asks_nothing() -> None:
    batch = torch.randn(4, 4), torch.randn(4, 2)

    def make(worker: int) -> Session:
        model = torch.nn.Linear(4, 2)
        return Session(
            model, torch.nn.MSELoss(), torch.optim.SGD(model.parameters()), max_steps=STEPS
        )

    def program(session: Session) -> int:
        lifecycle = session.worker.lifecycle
        if not lifecycle.task.index:
            while not session.should_stop():
                session.step(batch)
            return 0
        for steps in range(STEPS):
            if steps == 3:
                Observer(lifecycle.task.coordinator, JOB, SECRET).scale(workers=1)
                deadline = time.monotonic() + 10
                while lifecycle.dismissed is None:
                    assert time.monotonic() < deadline
                    time.sleep(0.001)
            try:
                session.step(batch)
            except ConfigurationError:  # it is out of the job
                return steps
        return STEPS

    cluster = Cluster(2, 1, strategy="async", prefetch=True, scheme="tcp", policy={"elastic": True})
    ran = run_job(cluster, make, program)
    assert ran.values[1] <= 6
    assert ran.over is not None and ran.over.outcome == "finished"
