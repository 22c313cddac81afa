"""What a loop that is not Trireme's keeps in the job's checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.loops.test_distribute import make, step
from trireme.errors import ConfigurationError
from trireme.loops.kept_state import decoded, encoded


class Held:
    """An object with a state."""

    def __init__(self, **state: Any) -> None:
        self.state = dict(state)

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


def test_a_state_comes_back_with_the_checkpoint(tmp_path: Path) -> None:
    model, optimizer = make(tmp_path)
    best = Held(score=0.0)
    assert not optimizer.keep("best", best)
    for score in (0.5, 0.75):
        best.state["score"] = score
        step(model, optimizer)
    optimizer.close()

    model, optimizer = make(tmp_path)
    again = Held(score=-1.0)
    assert optimizer.keep("best", again)
    assert again.state == {"score": 0.75} and optimizer.global_step == 2
    with pytest.raises(ConfigurationError, match="another object has this name"):
        optimizer.keep("best", Held())
    optimizer.close()


def test_a_schedule_that_is_kept_brings_its_rates(tmp_path: Path) -> None:
    rates = []
    for _ in range(2):
        model, optimizer = make(tmp_path)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        optimizer.keep("schedule", schedule)
        rates.append(optimizer.param_groups[0]["lr"])
        for _ in range(3):
            step(model, optimizer)
            schedule.step(1.0)
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.close()
    first, then, again, last = rates
    assert then == pytest.approx(first / 100) and again == pytest.approx(then)
    assert last < again


def test_states_hold_what_those_of_torch_hold() -> None:
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    adam = torch.optim.Adam([weight], lr=0.1)
    weight.grad = torch.ones_like(weight)
    adam.step()
    when, state = decoded(encoded("adam", 7, adam.state_dict()))
    assert when == 7
    other = torch.optim.Adam([torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))], lr=0.5)
    other.load_state_dict(state)
    (mine,) = other.state.values()
    assert torch.equal(mine["exp_avg"], adam.state[weight]["exp_avg"])
    assert other.param_groups[0]["lr"] == 0.1


def test_what_a_checkpoint_cannot_hold_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"keep\('odd'\): its state_dict has a function"):
        encoded("odd", 0, {"call": test_what_a_checkpoint_cannot_hold_is_named})
