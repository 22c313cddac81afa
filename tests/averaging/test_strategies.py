"""The strategies whose workers train locally, and what their options may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trireme
from tests.process_groups import ProcessGroup, run_process_group
from trireme.averaging.strategies import Averaging, DiLoCo
from trireme.errors import ConfigurationError
from trireme.job_config import JobConfig
from trireme.ps.rule import Rule
from trireme.strategies import Strategy, Sync, choose, resolve


@pytest.mark.parametrize(
    ("name", "options", "strategy", "rule"),
    [
        ("averaging", {}, Averaging(16), Rule(0, 0, every=16)),
        ("averaging", {"every": 4}, Averaging(4), Rule(0, 0, every=4)),
        ("averaging", {"staleness": 2}, Averaging(16, 2), Rule(1, 2, every=16)),
        ("diloco", {}, DiLoCo(100), Rule(0, 0, every=100)),
        ("diloco", {"every": 7, "aggregate": 2}, DiLoCo(7, 2), Rule(2, 0, every=7)),
    ],
)
def test_names_and_options(
    name: str, options: dict[str, Any], strategy: Strategy, rule: Rule
) -> None:
    found = resolve(name, JobConfig().with_values(options, {}))
    assert found == strategy
    assert found.rule() == rule


def test_the_servers_optimizer_over_deltas() -> None:
    assert Averaging().outer(3) == {"lr": 1.0}
    assert Averaging(staleness=1).outer(4) == {"lr": 0.25}
    assert DiLoCo().outer(4) == {"lr": 0.9, "momentum": 0.5, "nesterov": True}
    assert DiLoCo(outer_momentum=0.0).outer(4) == {"lr": 0.9, "momentum": 0.0, "nesterov": False}
    assert Sync().outer(4) is None


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "averaging",
            {"aggregate": 1},
            "only sync, diloco: add --strategy sync or diloco",
        ),
        ("diloco", {"staleness": 1}, "only ssp, averaging: add --strategy ssp or averaging"),
        (
            "sync",
            {"every": 4},
            r"every is 4 \(default\), which sync does not have, only averaging, diloco",
        ),
        (
            "averaging",
            {"prefetch": True},
            "which averaging does not have, only async, ssp",
        ),
        ("averagin", {}, "did you mean averaging"),
    ],
)
def test_options_of_other_strategies_are_refused(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        resolve(name, JobConfig().with_values(options, {}))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Averaging(0), "every 0"),
        (lambda: Averaging(staleness=0), "averaging with staleness 0: give 1 or more"),
        (lambda: DiLoCo(0), "every 0"),
        (lambda: DiLoCo(aggregate=0), "aggregate 0: give 1 or more"),
        (lambda: DiLoCo(outer_lr=0.0), "must be above 0"),
        (lambda: DiLoCo(outer_momentum=1.0), r"in \[0, 1\)"),
    ],
)
def test_values_out_of_range_are_refused(make: Callable[[], Strategy], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_a_round_must_be_able_to_fill() -> None:
    DiLoCo(aggregate=3).check(workers=3, servers=1)
    with pytest.raises(ConfigurationError, match="give at most --aggregate 2"):
        DiLoCo(aggregate=3).check(workers=2, servers=1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"workers": 2, "strategy": "diloco"}, "needs a parameter server: add --ps 1"),
        ({"ps": 1, "strategy": "sync", "every": 4}, "add --strategy averaging"),
        ({"ps": 1, "aggregate": 1}, "add --strategy sync or diloco"),
        ({"ps": 1, "aggregate": 1, "strategy": "async"}, "add --strategy sync or diloco"),
        ({"ps": 1, "staleness": 1, "strategy": "sync"}, "add --strategy ssp or averaging"),
        ({"ps": 1, "staleness": 1, "strategy": "diloco"}, "only ssp, averaging"),
    ],
)
def test_what_the_launch_contradicts_is_refused(given: dict[str, Any], message: str) -> None:
    config = JobConfig().with_values(given, {"strategy": "file x"})
    with pytest.raises(ConfigurationError, match=message):
        choose(config, workers=given.get("workers", 1), servers=config.tasks.ps)


@pytest.mark.parametrize(
    "given",
    [
        {"workers": 3, "ps": 1, "strategy": "diloco", "every": 50, "aggregate": 2},
        {"workers": 3, "ps": 1, "strategy": "averaging", "staleness": 2},
    ],
)
def test_what_makes_sense_passes(given: dict[str, Any]) -> None:
    config = JobConfig().with_values(given, {})
    choose(config, workers=given.get("workers", 1), servers=config.tasks.ps)


def unequal() -> list[int]:
    """Two epochs of 29 examples for two workers; returns the steps after each step of a loop."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = trireme.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = TensorDataset(torch.randn(29, 2), torch.randn(29, 1))
    counts = []
    for _epoch, (x, y) in optimizer.epochs(DataLoader(data, 1), 2):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        counts.append(optimizer.loop_steps)
    optimizer.close()
    return [*counts, optimizer.loop_steps]


@pytest.mark.parametrize("every", [4, 64])
def test_periods_end_with_an_epoch_in_which_workers_make_unequal_numbers_of_steps(
    every: int,
) -> None:
    group = ProcessGroup(workers=2, servers=1, strategy="averaging", every=every)
    more, fewer = sorted(run_process_group(group, unequal).values, key=len, reverse=True)
    assert more == [*range(1, 31), 30]
    assert fewer == [*range(1, 15), *range(16, 30), 30]
