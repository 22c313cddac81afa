"""What the job hears of a worker that ends by an error."""

from __future__ import annotations

from threading import Event

import pytest
import torch
from torch import nn

from tests.harness import Cluster, run_job
from trireme.errors import ConnectionRefused, ConnectTimeout, TriremeError, WireTimeout
from trireme.session.session import Session


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ConnectTimeout("could not reach ps:0 for 600 s"), "finished"),
        (WireTimeout("could not reach ps:0 for 600 s"), "finished"),
        (ConnectionRefused("could not reach ps:0 for 30 s"), "failed"),
    ],
    ids=["silence", "deadline", "refusal"],
)
def test_a_worker_that_was_cut_off_too_long_is_lost_and_fails_nothing(
    error: TriremeError, outcome: str
) -> None:
    batch = torch.randn(5, 8), torch.randint(0, 2, (5,))
    lost = Event()

    def session(worker: int) -> Session:
        model = nn.Linear(8, 2)
        return Session(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.01))

    def program(session: Session) -> None:
        if not session.is_chief:
            session.step(batch)
            session.worker.lifecycle.exits.callback(lost.set)
            raise error
        assert lost.wait(30)
        session.step(batch)

    ran = run_job(Cluster(2, 1, "async", policy={"reconnect_grace": 0.2}), session, program)
    assert ran.over is not None and ran.over.outcome == outcome
    assert ran.raised[1] is error
    assert (0 in ran.raised) == (outcome == "failed")
