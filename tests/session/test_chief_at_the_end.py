"""The last step is saved once, by whoever is chief when training has ended on all workers."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event

import pytest
import torch
from torch import nn

from tests.harness import Cluster, Ran, run_job
from trireme.session.checkpoint import latest
from trireme.session.session import Session

STEPS = 12


class Killed(Exception):
    pass


def run(tmp_path: Path, servers: int, *, kill: bool) -> tuple[Ran[None], list[bool], int | None]:
    """Runs a job, whose chief retires later than the other worker, or dies instead.

    Returns:
        How the job ended, whether each worker was chief then, and the saved step.
    """
    torch.manual_seed(3)
    batch = torch.randn(5, 8), torch.randint(0, 2, (5,))
    retired, sessions = Event(), list[Session]()

    def session(worker: int) -> Session:
        torch.manual_seed(4)
        sessions.append(
            Session(
                nn.Linear(8, 2),
                nn.CrossEntropyLoss(),
                lambda parameters: torch.optim.SGD(parameters, lr=0.01),
                run_dir=tmp_path,
                max_steps=STEPS,
            )
        )
        return sessions[worker]

    def program(session: Session) -> None:
        worker = session.worker
        if session.is_chief:
            worker.backend.retire = die if kill else worker.backend.retire  # type: ignore[method-assign]
        else:
            worker.backend.drain = partial(drain, worker.backend.drain)  # type: ignore[method-assign]
        while not session.should_stop():
            session.step(batch)

    def drain(then: Callable[[], None]) -> None:
        retired.set()
        then()
        member = sessions[1].worker.lifecycle.member
        assert member is not None
        gone = member.wait_until(lambda: member.view.chief == 1, time.monotonic() + 30)
        assert gone, "the chief has not left"

    def die() -> None:
        assert retired.wait(30)
        member = sessions[0].worker.lifecycle.member
        assert member is not None
        member.close()
        raise Killed

    cluster = Cluster(
        workers=2,
        servers=servers,
        strategy="async",
        run_dir=tmp_path,
        policy={"reconnect_grace": 0.2, "wait_for_restart": 0.0},
    )
    ran = run_job(cluster, session, program)
    checkpoint = latest(tmp_path, lambda path, error: None)
    chiefs = [session.is_chief for session in sessions]
    return ran, chiefs, None if checkpoint is None else checkpoint.step


@pytest.mark.parametrize("servers", [1, 2])
def test_who_has_retired_takes_over_from_a_chief_that_is_lost(tmp_path: Path, servers: int) -> None:
    ran, chiefs, saved = run(tmp_path, servers, kill=True)
    assert isinstance(ran.raised.pop(0), Killed)
    assert not ran.raised
    assert ran.over is not None and ran.over.outcome == "finished"
    assert chiefs[1]
    assert saved == STEPS


def test_nobody_takes_over_from_a_chief_that_has_saved(tmp_path: Path) -> None:
    ran, chiefs, saved = run(tmp_path, 2, kill=False)
    assert ran.values == [None, None]
    assert chiefs == [True, False]
    assert saved == STEPS
