"""The strategies whose workers train locally, and what their options may be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trireme
from tests.process_groups import ProcessGroup, run_process_group
from trireme.averaging.strategies import Averaging, DiLoCo
from trireme.errors import ConfigurationError
from trireme.job_config import JobConfig
from trireme.ps.rule import Rule
from trireme.session.checkpoint.history import list_checkpoints, step_of
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
        ("averaging", {"aggregate": 1}, "only sync, diloco: add --strategy sync or diloco"),
        ("diloco", {"staleness": 1}, "only ssp, averaging: add --strategy ssp or averaging"),
        (
            "sync",
            {"every": 4},
            r"every is 4 \(default\), which sync does not have, only averaging, diloco",
        ),
        ("averaging", {"prefetch": True}, "which averaging does not have, only async, ssp"),
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


def counted() -> tuple[int, int, int]:
    """Two epochs; returns how many steps were made, how many are applied, and all of the job."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(29, 2), torch.randn(29, 1))
    made = 0
    with trireme.Session(model, nn.MSELoss(), optimizer) as session:
        for _ in session.epochs(2):
            for batch in session.loader(data, batch_size=1):
                session.step(batch)
                made += 1
        session.job.end()
        return made, session.job.recorder.applied, session.global_step


@pytest.mark.parametrize("every", [4, 8, 64])
def test_steps_count_as_those_of_the_worker_that_made_them(every: int) -> None:
    group = ProcessGroup(workers=2, servers=1, strategy="averaging", every=every)
    values = run_process_group(group, counted).values
    assert sorted(values) == [(28, 28, 30), (30, 30, 30)]


def test_steps_without_examples_are_no_steps_of_the_job_where_nobody_waits_in_rounds() -> None:
    group = ProcessGroup(workers=2, servers=1, strategy="averaging", every=4, staleness=2)
    values = run_process_group(group, counted).values
    assert [made for made, _, _ in values] == [applied for _, applied, _ in values]
    assert {steps for _, _, steps in values} == {58}


def test_an_epoch_ends_alike_in_all_processes_of_a_worker() -> None:
    mesh = ProcessGroup(
        workers=1, servers=1, mesh="dp=2", inside=2, strategy="averaging", every=1000
    )
    assert {steps for _, _, steps in run_process_group(mesh, counted).values} == {30}


def saving() -> None:
    """Four epochs of steps that save every 20, each shorter than a period."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    data = TensorDataset(torch.randn(29, 2), torch.randn(29, 1))
    checkpoint = trireme.Checkpoint(every_steps=20, keep=9)
    with trireme.Session(model, nn.MSELoss(), optimizer, checkpoint=checkpoint) as session:
        for _ in session.epochs(4):
            for batch in session.loader(data, batch_size=1):
                session.step(batch)
            session.worker.storage.settle()  # a slow disk skips what lies between two saves


def test_what_is_due_is_saved_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    group = ProcessGroup(workers=2, servers=1, strategy="averaging", every=1000, run_dir=tmp_path)
    assert not run_process_group(group, saving).raised
    saved = list_checkpoints(tmp_path)
    assert [step_of(each) for each in saved] == [30, 45, 60]
    for each in saved:
        states = load_file(tmp_path / "checkpoints" / each.name / "local.safetensors")
        assert {name.partition("/")[0] for name in states} == {"0", "1"}
