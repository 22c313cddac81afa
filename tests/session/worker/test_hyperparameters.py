"""Settings that a program changes in place reach the servers, as one process has them at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules

from tests.harness import Cluster, run_job
from trireme.session.session import Session

BATCH = (torch.ones(8, 4), torch.zeros(8, 1))


def tensor_rate(optimizer: torch.optim.Optimizer, step: int) -> None:
    """As torch's schedulers do where the rate is a tensor."""
    optimizer.param_groups[0]["lr"].fill_(0.1 * 0.5**step)


def list_of_betas(optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.param_groups[0]["betas"][0] = 0.9 - 0.2 * step


def tensor_of_betas(optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.param_groups[0]["betas"][0].fill_(0.9 - 0.2 * step)


CHANGES: list[tuple[Callable[..., None], dict[str, Any]]] = [
    (tensor_rate, {"lr": torch.tensor(0.1), "foreach": False}),
    (list_of_betas, {"lr": 0.1, "betas": [0.9, 0.99]}),
    (tensor_of_betas, {"lr": 0.1, "betas": (torch.tensor(0.9), torch.tensor(0.99))}),
]


@pytest.mark.parametrize(("change", "settings"), CHANGES)
def test_a_setting_that_is_changed_in_place_counts_as_in_one_process(
    change: Callable[..., None], settings: dict[str, Any]
) -> None:
    def trained(cluster: Cluster) -> torch.Tensor:
        own = {name: _copied(value) for name, value in settings.items()}

        def program(session: Session) -> torch.Tensor:
            for step in range(4):
                change(session.optimizer, step)
                session.step(BATCH)
            return session.model.weight.detach().clone()

        def session(worker: int) -> Session:
            torch.manual_seed(0)
            model = nn.Linear(4, 1)
            adam = torch.optim.Adam(model.parameters(), lr=0.1)
            adam.param_groups[0].update(own)
            return Session(model, nn.functional.mse_loss, adam, max_steps=4)

        return run_job(cluster, session, program).values[0]

    assert torch.allclose(trained(Cluster(1, 1, "async")), trained(Cluster(1, 0)), atol=1e-6)


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda made: schedules.LambdaLR(made, lambda step: 1 / (1 + step)),
    "cycle": lambda made: schedules.OneCycleLR(made, 1.0, 100),
    "several": lambda made: schedules.SequentialLR(
        made, [schedules.LinearLR(made), schedules.ExponentialLR(made, 0.9)], [7]
    ),
    "restarts": lambda made: schedules.CosineAnnealingWarmRestarts(made, 5),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_a_schedule_goes_back_with_the_job(name: str, rate: Any) -> None:
    def session() -> Session:
        model = nn.Linear(4, 1)
        adam = torch.optim.Adam(model.parameters(), lr=_copied(rate), foreach=False)
        loss = nn.functional.mse_loss
        return Session(model, loss, adam, scheduler=SCHEDULES[name])

    def settings(session: Session) -> list[float]:
        (group,) = session.optimizer.param_groups
        return [float(group["lr"]), *group["betas"]]

    with session() as gone_back:
        hyper = gone_back.worker.hyper
        hyper.advance(50)
        hyper.rewind()
        hyper.advance(20)
        found = settings(gone_back)
    with session() as straight:
        straight.worker.hyper.advance(20)
        assert found == pytest.approx(settings(straight))


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return type(value)(map(_copied, value)) if isinstance(value, (list, tuple)) else value
