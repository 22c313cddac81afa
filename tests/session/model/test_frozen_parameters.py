"""A layer that is frozen when training begins, and unfrozen while it runs."""

from __future__ import annotations

import torch
from torch import nn

import trireme
from tests.harness import Cluster, run_job
from trireme.errors import ConfigurationError
from trireme.session.session import Session


def model() -> nn.Sequential:
    made = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    made[0].requires_grad_(False)
    return made


def test_a_session_with_servers_refuses_by_name_what_it_would_not_train() -> None:
    def make(index: int) -> Session:
        return trireme.Session(
            model(),
            nn.MSELoss(),
            lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            max_steps=5,
        )

    def program(session: Session) -> None:
        batch = (torch.ones(4, 3), torch.ones(4, 2))
        session.step(batch)
        session.model[0].requires_grad_(True)  # type: ignore[index]
        session.step(batch)

    error = run_job(Cluster(), make, program).raised[0]
    assert isinstance(error, ConfigurationError)
    assert "parameter '0.weight' requires a gradient" in str(error)


def test_one_process_trains_it_from_then_on() -> None:
    mine = model()
    optimizer = trireme.distribute(mine, torch.optim.SGD(mine.parameters(), lr=0.1))
    values = [mine[0].weight.detach().clone()]
    for trains in (False, True):
        mine[0].requires_grad_(trains)
        optimizer.zero_grad()
        mine(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        values.append(mine[0].weight.detach().clone())
    optimizer.close()
    first, frozen, trained = values
    assert torch.equal(first, frozen) and not torch.equal(frozen, trained)


def test_what_is_frozen_after_training_began_may_be_unfrozen() -> None:
    mine = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = trireme.distribute(mine, torch.optim.SGD(mine.parameters(), lr=0.1))
    values = []
    for trains in (False, True):
        mine[0].requires_grad_(trains)
        optimizer.zero_grad()
        mine(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        values.append(mine[0].weight.detach().clone())
    optimizer.close()
    assert not torch.equal(*values)
