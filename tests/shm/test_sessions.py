"""What a session that lends memory leaves behind: nothing, once its model is gone too."""

from __future__ import annotations

import gc
import os
from contextlib import suppress

import pytest
import torch
from torch import nn

from tests.harness import Cluster, run_job
from trireme.session.session import Session
from trireme.shm.memory import available

pytestmark = pytest.mark.skipif(not available(), reason="memory of this kind needs Linux")


def memories() -> int:
    """Returns how many descriptors of lent memory this process has."""
    gc.collect()
    names: list[str] = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            names.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sum(name.startswith("/memfd:trireme") for name in names)


def test_a_session_that_is_over_keeps_no_descriptor_though_its_models_lie_there() -> None:
    before, models = memories(), list[nn.Module]()
    lent: list[int] = []

    def session(worker: int) -> Session:
        models.append(nn.Linear(8, 2))
        optimizer = torch.optim.SGD(models[-1].parameters(), lr=0.1)
        return Session(models[-1], nn.CrossEntropyLoss(), optimizer, max_steps=4)

    def program(session: Session) -> None:
        while not session.should_stop():
            session.step((torch.zeros(5, 8), torch.zeros(5, dtype=torch.long)))
        lent.append(memories() - before)

    ran = run_job(Cluster(2, 1, "async", scheme="shm"), session, program)
    assert not ran.raised
    assert max(lent) >= 2
    del ran
    assert memories() == before
    assert all(bool(each.weight.isfinite().all()) for each in models)
