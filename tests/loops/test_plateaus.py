"""`ReduceLROnPlateau`, which needs a metric and so a loop of one's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import trireme
from tests.process_groups import ProcessGroup, run_process_group
from trireme.loops.distributed_optimizer import DistributedOptimizer

Wrap = Callable[[nn.Module, torch.optim.Optimizer], torch.optim.Optimizer]


def trained(wrap: Wrap) -> tuple[list[float], float]:
    """Trains with a rate that falls twice; returns the values and the rate."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5))
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=1)
    for metric in (1.0, 0.5, 0.5, 0.5, 0.4, 0.4, 0.4, 0.4):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).square().mean().backward()
        optimizer.step()
        schedule.step(metric)
    rate = optimizer.param_groups[0]["lr"]
    if isinstance(optimizer, DistributedOptimizer):
        optimizer.close()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist(), rate


def distributed() -> tuple[list[float], float]:
    return trained(trireme.distribute)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "group",
    [ProcessGroup(servers=2), ProcessGroup(workers=2, servers=1, strategy="sync")],
    ids=["async", "sync"],
)
def test_servers_take_the_rate_that_it_sets(group: ProcessGroup) -> None:
    values, rate = trained(lambda _, optimizer: optimizer)
    assert rate == pytest.approx(0.005)
    for found, its in run_process_group(group, distributed).values:
        assert found == pytest.approx(values, abs=1e-6)
        assert its == rate
