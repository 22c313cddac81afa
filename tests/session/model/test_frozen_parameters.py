"""A layer that is frozen when training begins, and unfrozen while it runs."""

from __future__ import annotations

import torch
from torch import nn

import trireme
from tests.harness import Cluster, run_job
from trireme.session.session import Session


def model() -> nn.Sequential:
    made = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    made[0].requires_grad_(False)
    return made


def test_a_session_with_servers_trains_it_from_then_on() -> None:
    def make(index: int) -> Session:
        return trireme.Session(
            model(),
            nn.MSELoss(),
            lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            max_steps=5,
        )

    def program(session: Session) -> tuple[bool, bool]:
        batch = (torch.ones(4, 3), torch.ones(4, 2))
        frozen = session.model[0].weight  # type: ignore[index]
        first = frozen.detach().clone()
        session.step(batch)
        stays = torch.equal(frozen, first)
        session.model[0].requires_grad_(True)  # type: ignore[index]
        session.step(batch)
        return stays, torch.equal(frozen, first)

    assert run_job(Cluster(), make, program).values == [(True, False)]


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
