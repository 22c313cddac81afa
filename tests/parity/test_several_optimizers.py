"""Several optimizers in one program: what they make of a GAN, plain torch makes of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trireme
from tests.parity.gan import (
    ROUNDS,
    step_another,
    step_another_in_session,
    step_another_later,
    train_loop,
    train_plain,
    train_session,
    train_tutorial,
    train_tutorial_plain,
)
from tests.parity.plain import Values, difference
from tests.process_groups import ProcessGroup, run_process_group
from trireme.errors import ConfigurationError

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

CLOSE = 1e-6
WAYS = {
    "python": ProcessGroup(),
    "allreduce": ProcessGroup(2),
    "fsdp": ProcessGroup(2, strategy="fsdp"),
    "ps async": ProcessGroup(1, servers=1, strategy="async"),
    "ps sync": ProcessGroup(2, servers=2, strategy="sync"),
    "ps averaging": ProcessGroup(1, servers=1, strategy="averaging", every=2),
    "ps sync over tp=2": ProcessGroup(1, servers=1, strategy="sync", mesh="tp=2", inside=2),
}


@pytest.fixture(scope="module")
def plain() -> Values:
    return train_plain()


def check(
    process_group: ProcessGroup, program: Callable[..., Any], wanted: Values, rounds: int = ROUNDS
) -> None:
    for values in run_process_group(process_group, program, rounds).values:
        assert difference({n: torch.from_numpy(v) for n, v in values.items()}, wanted) <= CLOSE


@pytest.mark.slow(one_in=2)
@pytest.mark.thorough(but=("allreduce-train_session", "fsdp-train_loop", "ps sync-train_session"))
@pytest.mark.parametrize("program", [train_loop, train_session])
@pytest.mark.parametrize("way", WAYS)
def test_a_gan_equals_plain_torch(way: str, program: Any, plain: Values) -> None:
    check(WAYS[way], program, plain)


@pytest.mark.parametrize("way", ["python", "ps async", "ps sync", "ps sync over dp=2"])
def test_both_steps_may_be_from_one_fake_batch(way: str) -> None:
    over = ProcessGroup(1, servers=1, strategy="sync", mesh="dp=2", inside=2)
    check(WAYS.get(way, over), train_tutorial, train_tutorial_plain())


@pytest.mark.parametrize("way", ["python", "ps sync"])
def test_both_go_on_where_they_were_saved(way: str, plain: Values, tmp_path: Path) -> None:
    spread = WAYS[way]
    process_group = ProcessGroup(
        spread.workers, spread.servers, strategy=spread.strategy, run_dir=tmp_path
    )
    check(process_group, train_loop, train_plain(4), rounds=4)
    check(process_group, train_loop, plain)


@pytest.mark.parametrize("program", [step_another, step_another_in_session])
def test_processes_that_step_together_must_step_the_same_one(program: Any) -> None:
    for rank, told in enumerate(run_process_group(WAYS["allreduce"], program).values):
        assert f"rank {rank} makes a step of optimizer {rank}" in told


def two() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    return a, b, torch.optim.SGD(a.parameters()), torch.optim.Adam(b.parameters())


def test_a_list_comes_back_as_a_list() -> None:
    a, b, first, second = two()
    joined = trireme.distribute([a, b], [first, second])
    assert [o.param_groups is g.param_groups for o, g in zip(joined, (first, second), strict=True)]
    assert joined[0].param_groups[0]["params"][0] is a.weight
    joined[0].close()


def test_a_second_call_names_the_form_for_several() -> None:
    a, b, first, second = two()
    joined = trireme.distribute(a, first)
    with pytest.raises(ConfigurationError, match=r"distribute\(model, \[first, second\]\)"):
        trireme.distribute(b, second)
    joined.close()
    trireme.distribute(b, second).close()


def test_a_parameter_has_one_optimizer() -> None:
    a, b, first, _ = two()
    with pytest.raises(ConfigurationError, match=r"0 and 1 have a parameter .*in common"):
        trireme.distribute([a, b], [first, torch.optim.Adam(a.parameters())])


def make_session(optimizer: Any) -> trireme.Session:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    return trireme.Session(model, nn.MSELoss(), optimizer)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters)


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        ({"a": adam, "c": adam}, r"optimizer 'c' is <function adam.*the model has 'a', 'b'"),
        ([adam, adam], "optimizers and functions by name"),
        ({}, "give a function that builds one"),
        ("Adam", "give a function that builds one"),
    ],
)
def test_what_cannot_be_built_says_what_can(optimizer: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said), make_session(optimizer):
        pass


@pytest.mark.parametrize(("name", "said"), [(None, "say which"), ("c", "optimizer=.c.")])
def test_a_step_names_its_optimizer(name: Any, said: str) -> None:
    both = {"a": adam, "b": adam}
    with pytest.raises(ConfigurationError, match=f"{said}.*'a', 'b'"), make_session(both) as s:
        s.step((torch.ones(1, 2), torch.ones(1, 2)), optimizer=name)


def test_one_optimizer_is_not_named() -> None:
    with pytest.raises(ConfigurationError, match="has one optimizer"), make_session(adam) as s:
        s.step((torch.ones(1, 2), torch.ones(1, 2)), optimizer="a")


@pytest.mark.parametrize("servers", [1, 2])
def test_a_round_has_no_updates_of_different_optimizers(servers: int) -> None:
    group = ProcessGroup(2, servers=servers, strategy="sync")
    ran = run_process_group(group, step_another_later)
    said = "".join(ran.raised.values())
    assert "steps optimizer " in said and "all of a round step the same" in said
