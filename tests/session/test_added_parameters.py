"""Parameters that a program gives to its optimizer, or unfreezes, after training began."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import trireme
from tests.process_groups import ProcessGroup, run_process_group
from trireme.errors import ConfigurationError

INPUTS = torch.linspace(-1, 1, 24).reshape(4, 6)


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def by_method(optimizer: torch.optim.Optimizer, late: nn.Module) -> None:
    optimizer.add_param_group({"params": list(late.parameters()), "lr": 0.01})


def by_appending(optimizer: torch.optim.Optimizer, late: nn.Module) -> None:
    group = {**optimizer.param_groups[0], "lr": 0.01, "params": list(late.parameters())}
    optimizer.param_groups.append(group)


def by_extending(optimizer: torch.optim.Optimizer, late: nn.Module) -> None:
    optimizer.param_groups[0]["params"].extend(late.parameters())


def by_unfreezing(optimizer: torch.optim.Optimizer, late: nn.Module) -> None:
    late.requires_grad_(True)


def by_removing(optimizer: torch.optim.Optimizer, late: nn.Module) -> None:
    optimizer.param_groups[0]["params"][-1:] = []


WAYS: dict[str, Callable[[torch.optim.Optimizer, nn.Module], None]] = {
    "add_param_group": by_method,
    "append": by_appending,
    "extend": by_extending,
    "unfreeze": by_unfreezing,
    "remove": by_removing,
}


def first_optimizer(model: nn.Sequential, way: str) -> torch.optim.Optimizer:
    """An optimizer of the last layer, or of both layers of which the first is frozen."""
    if way == "unfreeze":
        model[0].requires_grad_(False)
        return torch.optim.Adam(model.parameters(), lr=0.05)
    return torch.optim.Adam(model[2].parameters(), lr=0.05)


def loop(way: str, over: str = "given") -> None:
    model = made()
    given = first_optimizer(model, way)
    optimizer = trireme.distribute(model, given)
    try:
        for step in range(4):
            model.zero_grad()
            model(INPUTS).square().mean().backward()
            optimizer.step()
            if step == 1:
                WAYS[way](given if over == "given" else optimizer, model[0])
    except ConfigurationError as error:
        optimizer.worker.fail(error)
        raise
    optimizer.close()


def session(way: str) -> None:
    def optimizer_of(params: object) -> torch.optim.Optimizer:
        return first_optimizer(model, way)

    model = made()
    joined = trireme.Session(model, lambda out, _: out.square().mean(), optimizer_of)
    with joined:
        for step in range(4):
            joined.step((INPUTS, INPUTS))
            if step == 1:
                WAYS[way](joined.optimizer, model[0])


SHARED = [
    ProcessGroup(),
    ProcessGroup(workers=2),
    ProcessGroup(workers=2, strategy="fsdp"),
    ProcessGroup(servers=1),
    ProcessGroup(servers=2, strategy="sync"),
    ProcessGroup(servers=1, strategy="averaging", every=2),
    ProcessGroup(servers=1, mesh="dp=2", inside=2),
]
IDS = ["alone", "allreduce", "fsdp", "async", "sync", "averaging", "a mesh in a worker"]


def expected(way: str) -> str:
    name = "parameter '0.weight' "
    if way == "unfreeze":
        return f"{name}requires a gradient now, and did not when training began"
    if way == "remove":
        return "the groups of the optimizer have 1 parameters now, and had 2"
    return f"{name}and 1 more was given to the optimizer after training began"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("group", SHARED, ids=IDS)
def test_a_loop_is_refused_by_name_what_would_not_be_trained(group: ProcessGroup, way: str) -> None:
    ran = run_process_group(group, loop, way)
    assert ran.raised and all(expected(way) in said for said in ran.raised.values())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "group", [*SHARED, ProcessGroup(workers=2, strategy="pipeline")], ids=[*IDS, "pipeline"]
)
def test_a_session_is_refused_likewise(group: ProcessGroup, way: str) -> None:
    raised = run_process_group(group, session, way).raised
    want = "parameters now, and had" if way == "remove" else expected(way)
    assert any(want in said for said in raised.values())  # a stage has some of them
