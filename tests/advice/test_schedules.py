"""Schedules that a program steps past their end itself: a note says what was counted."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR

from tests.harness import Cluster, run_job
from tests.session.test_schedules import BATCH, made
from trireme.session.session import Session


def test_a_schedule_that_the_program_steps_past_its_end_is_explained_below_torch_s_error() -> None:
    def program(session: Session) -> None:
        schedule = OneCycleLR(session.optimizer, 0.1, total_steps=3)
        while not session.should_stop():
            session.step(BATCH)
            schedule.step()

    def session(worker: int) -> Session:
        return made(torch.nn.Linear(4, 1), lambda p: torch.optim.SGD(p, lr=0.1), None, 12)

    with pytest.raises(ValueError, match="Tried to step 4 times") as raised:
        _ = run_job(Cluster(1, 1, "async"), session, program).values
    (note,) = raised.value.__notes__
    assert "built for 3 steps, and was asked for step 4. The job is at global step 4" in note
    assert "a step of the loop is a global step" in note
