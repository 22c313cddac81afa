"""A layer that is frozen when training begins, and unfrozen while it runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trireme
from trireme.errors import ConfigurationError


def model() -> nn.Sequential:
    made = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    made[0].requires_grad_(False)
    return made


def test_a_session_refuses_by_name_what_it_would_not_train() -> None:
    session = trireme.Session(
        model(),
        nn.MSELoss(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        max_steps=5,
    )
    batch = (torch.ones(4, 3), torch.ones(4, 2))
    refused = pytest.raises(ConfigurationError, match=r"parameter '0\.weight' requires a gradient")
    with refused, session:
        session.step(batch)
        session.model[0].requires_grad_(True)  # type: ignore[index]
        session.step(batch)


def test_a_loop_is_told_so_too() -> None:
    mine = model()
    optimizer = trireme.distribute(mine, torch.optim.SGD(mine.parameters(), lr=0.1))
    mine(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    mine[0].requires_grad_(True)
    mine(torch.ones(4, 3)).sum().backward()
    with pytest.raises(ConfigurationError, match=r"parameter '0\.weight' requires a gradient now"):
        optimizer.step()
    optimizer.close()


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
