"""A pipeline whose program freezes and unfreezes the parameters of whole stages."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import trireme
from tests.process_groups import ProcessGroup, run_process_group

INPUTS = torch.linspace(-1, 1, 48).reshape(8, 6)
TARGETS = torch.linspace(1, -1, 16).reshape(8, 2)


def made() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def thaw(model: nn.Sequential, step: int) -> None:
    """The first stage is frozen for two steps, and again from the fifth."""
    model[:3].requires_grad_(2 <= step < 5)


def losses(step_of: Callable[[], float], model: nn.Sequential) -> list[float]:
    found = []
    for step in range(7):
        thaw(model, step)
        found.append(step_of())
    return found


def piped() -> list[float]:
    model, optimizer = made()
    config = trireme.PipelineConfig(split=("3",))
    session = trireme.Session(model, nn.MSELoss(), optimizer, pipeline=config)
    with session:
        return losses(lambda: float(session.step((INPUTS, TARGETS)).loss), model)


def plain() -> list[float]:
    model, optimizer = made()

    def step() -> float:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(INPUTS), TARGETS)
        loss.backward()
        optimizer.step()
        return float(loss)

    return losses(step, model)


def test_all_of_a_stage_is_unfrozen_and_frozen_as_in_one_process() -> None:
    for found in run_process_group(ProcessGroup(workers=2, strategy="pipeline"), piped).values:
        assert found == pytest.approx(plain(), abs=1e-6)
