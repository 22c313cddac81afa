"""Closures of a program's own loop: an optimizer of one's own calls them as often as it likes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import trireme
from tests.process_groups import ProcessGroup, run_process_group
from trireme.errors import TriremeError

INPUTS = torch.linspace(-1, 1, 48).reshape(8, 6)
TARGETS = torch.linspace(1, -1, 16).reshape(8, 2).square()


class SAM(torch.optim.Optimizer):
    """Foret et al., Sharpness-Aware Minimization (ICLR 2021), over SGD, as it is often written."""

    def __init__(self, params: Any, lr: float, rho: float = 0.2) -> None:
        super().__init__(params, {"lr": lr, "rho": rho})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        assert closure is not None, "SAM needs a closure"
        closure = torch.enable_grad()(closure)
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        rho, lr = self.param_groups[0]["rho"], self.param_groups[0]["lr"]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        moves = [p.grad * (rho / (norm + 1e-12)) for p in params]
        for p, move in zip(params, moves, strict=True):
            p.add_(move)
        loss = closure()
        for p, move in zip(params, moves, strict=True):
            p.sub_(move)
            p.sub_(p.grad * lr)
        return loss


class Halving(torch.optim.Optimizer):
    """Halves its step until the loss falls: how often depends on the losses that it sees."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 8.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        assert closure is not None
        closure = torch.enable_grad()(closure)
        before = float(closure())
        (group,) = self.param_groups
        then = [p.clone() for p in group["params"]]
        ways = [p.grad.clone() for p in group["params"]]
        lr = group["lr"]
        for _ in range(12):
            for p, start, way in zip(group["params"], then, ways, strict=True):
                p.copy_(start - lr * way)
            if float(closure()) < before:
                break
            lr /= 2
        return before


KINDS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sam": lambda model: SAM(model.parameters(), lr=0.1),
    "halving": lambda model: Halving(model.parameters()),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.05),
}


def train(
    kind: str, share: Callable[[torch.Tensor], torch.Tensor], wrap: Callable[[Any, Any], Any]
) -> tuple[list[float], list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = wrap(model, KINDS[kind](model))
    losses = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = (model(share(INPUTS)) - share(TARGETS)).square().mean()
        loss.backward()
        return loss

    for _ in range(5):
        closure()  # SAM expects the first gradient to be there
        losses.append(float(torch.as_tensor(optimizer.step(closure)).detach()))
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    values: list[float] = torch.cat([p.detach().reshape(-1) for p in whole]).tolist()
    if hasattr(optimizer, "close"):
        optimizer.close()
    return values, losses


def loop(kind: str) -> tuple[list[float], list[float]]:
    made: list[Any] = []

    def share(rows: torch.Tensor) -> torch.Tensor:
        return rows[made[0].replica :: made[0].replicas]

    def wrap(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        made.append(trireme.distribute(model, optimizer))
        return made[0]

    return train(kind, share, wrap)


@pytest.mark.thorough(but=("alone-sam", "alone-halving", "alone-adam", "allreduce-sam"))
@pytest.mark.parametrize("kind", ["sam", "halving", "adam"])
@pytest.mark.parametrize(
    "group",
    [ProcessGroup(), ProcessGroup(workers=2), ProcessGroup(workers=2, strategy="fsdp")],
    ids=["alone", "allreduce", "fsdp"],
)
def test_an_optimizer_calls_its_closure_as_in_plain_pytorch(group: ProcessGroup, kind: str) -> None:
    values, losses = train(kind, lambda rows: rows, lambda _, optimizer: optimizer)
    for found, lost in run_process_group(group, loop, kind).values:
        assert found == pytest.approx(values, abs=2e-5)
        if kind != "adam" or group.workers == 1:  # whose closure each process evaluates for itself
            assert lost == pytest.approx(losses, abs=2e-5)


def refused(kind: str) -> str:
    made: list[Any] = []

    def wrap(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        made.append(trireme.distribute(model, optimizer))
        return made[0]

    try:
        train(kind, lambda rows: rows, wrap)
    except TriremeError as error:
        for optimizer in made:
            optimizer.worker.fail(error)
        return str(error)
    return "trained"


@pytest.mark.parametrize(
    ("group", "said"),
    [
        (ProcessGroup(servers=1), "the parameter server has no optimizer tests.loops"),
        (ProcessGroup(servers=1, strategy="sync"), "the parameter server has no optimizer tests."),
        (ProcessGroup(servers=1, strategy="averaging", every=2), "the closure of SAM would be"),
    ],
    ids=["async", "sync", "averaging"],
)
def test_servers_refuse_it_by_name(group: ProcessGroup, said: str) -> None:
    (found,) = run_process_group(group, refused, "sam").values
    assert said in found


def test_servers_evaluate_the_closure_of_their_own_optimizers_once() -> None:
    values, losses = train("adam", lambda rows: rows, lambda _, optimizer: optimizer)
    ((found, lost),) = run_process_group(ProcessGroup(servers=1), loop, "adam").values
    assert found == pytest.approx(values, abs=1e-5) and lost == pytest.approx(losses, abs=1e-5)
