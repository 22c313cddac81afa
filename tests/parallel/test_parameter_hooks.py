"""Hooks of parameters run wherever the model goes, or are refused by the parameter's name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import trireme
from tests.process_groups import ProcessGroup, run_process_group

INPUTS = torch.linspace(-1, 1, 48).reshape(8, 6)
TARGETS = torch.linspace(1, -1, 16).reshape(8, 2)


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2))


def hook(model: nn.Module, name: str, kind: str, fired: list[int]) -> None:
    parameter: Any = model.get_parameter(name)

    def change(gradient: torch.Tensor) -> torch.Tensor:
        fired.append(1)
        return gradient * 0.25

    def clear(parameter: nn.Parameter) -> None:
        fired.append(1)
        assert parameter.grad is not None
        parameter.grad.mul_(0.25)

    if kind != "post-accumulate":
        parameter.register_hook(change)
    if kind != "register_hook":
        parameter.register_post_accumulate_grad_hook(clear)


def values(model: nn.Module) -> list[float]:
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    found: list[float] = torch.cat([p.detach().reshape(-1) for p in whole]).tolist()
    return found


def plain(name: str, kind: str) -> list[float]:
    model = made()
    hook(model, name, kind, [])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(3):
        optimizer.zero_grad()
        nn.MSELoss()(model(INPUTS), TARGETS).backward()
        optimizer.step()
    return values(model)


def session(name: str, kind: str, late: bool = False) -> tuple[list[float], int]:
    fired: list[int] = []
    model = made()
    if not late:
        hook(model, name, kind, fired)
    joined = trireme.Session(model, nn.MSELoss(), lambda params: torch.optim.SGD(params, lr=0.3))
    with joined:
        if late:
            hook(joined.model, name, kind, fired)
        for _ in range(3):
            joined.step((INPUTS, TARGETS))
    return values(joined.model), len(fired)


def loop(name: str, kind: str) -> tuple[list[float], int]:
    fired: list[int] = []
    model = made()
    hook(model, name, kind, fired)
    optimizer = trireme.distribute(model, torch.optim.SGD(model.parameters(), lr=0.3))
    for _ in range(3):
        optimizer.zero_grad()
        nn.MSELoss()(model(INPUTS), TARGETS).backward()
        optimizer.step()
    found = values(model), len(fired)
    optimizer.close()
    return found


ALLREDUCE = ProcessGroup(workers=2, strategy="allreduce")


@pytest.mark.parametrize(
    ("group", "program", "name"),
    [
        (ProcessGroup(), session, "0.weight"),
        (ALLREDUCE, session, "0.weight"),
        (ALLREDUCE, loop, "0.weight"),
        (ProcessGroup(servers=1, strategy="sync"), session, "0.weight"),
        (ProcessGroup(servers=1, mesh="dp=2", inside=2), session, "0.weight"),
        (ProcessGroup(workers=2, strategy="tensor"), loop, "1.weight"),
    ],
    ids=["alone", "allreduce", "a loop", "sync", "replicas in a worker", "tensor, not split"],
)
def test_hooks_run_as_in_plain_pytorch(group: ProcessGroup, program: Any, name: str) -> None:
    want = plain(name, "both")
    for found, fired in run_process_group(group, program, name, "both").values:
        assert found == pytest.approx(want, abs=1e-5)
        assert fired == 6


CUT = {
    "fsdp": ProcessGroup(workers=2, strategy="fsdp"),
    "tensor": ProcessGroup(workers=2, strategy="tensor"),
    "shards in a worker": ProcessGroup(servers=1, mesh="fsdp=2", inside=2),
    "pipeline": ProcessGroup(workers=2, strategy="pipeline", microbatches=2),
    "graph": ProcessGroup(workers=2, strategy="graph", microbatches=2),
}


@pytest.mark.parametrize(
    ("way", "program", "kind"),
    [
        ("fsdp", loop, "register_hook"),
        ("fsdp", session, "post-accumulate"),
        pytest.param("tensor", session, "register_hook", marks=pytest.mark.thorough),
        ("pipeline", session, "post-accumulate"),
        ("graph", session, "register_hook"),
    ],
)
def test_hooks_of_parameters_that_are_cut_are_refused_by_name(
    way: str, program: Any, kind: str
) -> None:
    ran = run_process_group(CUT[way], program, "0.weight", kind)
    assert len(ran.raised) == 2
    assert all("parameter '0.weight' has a hook" in said for said in ran.raised.values())


@pytest.mark.thorough(but=("shards in a worker", "graph"))
@pytest.mark.parametrize("way", CUT)
def test_hooks_that_come_later_are_refused_likewise(way: str) -> None:
    ran = run_process_group(CUT[way], session, "0.weight", "register_hook", True)
    assert any("parameter '0.weight' has a hook" in said for said in ran.raised.values())
