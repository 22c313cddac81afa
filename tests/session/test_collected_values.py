"""`session.model` has the trained values inside the block too, also where it is cut into parts."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import trireme
from tests.process_groups import ProcessGroup, run_process_group
from trireme.errors import ConfigurationError

DATA = TensorDataset(
    torch.linspace(-1, 1, 96).reshape(16, 6), torch.linspace(1, -1, 32).reshape(16, 2)
)


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def values(model: nn.Module) -> list[float]:
    found: list[float] = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()
    return found


def program(batch_size: int) -> tuple[dict[str, list[float]], float, float]:
    """Two epochs; returns the values that the model shows on the way, and two ways of one loss."""
    session = trireme.Session(
        made(), nn.MSELoss(), lambda params: torch.optim.SGD(params, lr=0.3, momentum=0.9)
    )
    shown: dict[str, list[float]] = {}
    with session:
        for epoch in session.epochs(2):
            for batch in session.loader(DATA, batch_size=batch_size, shuffle=False):
                session.step(batch)
                if session.is_chief:
                    shown[f"step {session.global_step}"] = values(session.model)
            shown[f"epoch {epoch}"] = values(session.model) if session.is_chief else []
        shown["after the epochs"] = values(session.model)
        evaluated = session.evaluate(DATA)["loss"]
        inputs, targets = DATA.tensors
        with torch.no_grad():
            by_hand = float(nn.MSELoss()(session.model(inputs), targets))
    shown["after the block"] = values(session.model)
    return shown, evaluated, by_hand


@pytest.mark.thorough(but=("fsdp", "graph"))
@pytest.mark.parametrize(
    "group",
    [
        ProcessGroup(workers=2, strategy="fsdp"),
        ProcessGroup(workers=2, strategy="pipeline", microbatches=2),
        ProcessGroup(workers=2, strategy="tensor"),
        ProcessGroup(workers=2, strategy="graph", microbatches=2),
        ProcessGroup(workers=2, strategy="allreduce"),
        ProcessGroup(servers=1, strategy="sync", mesh="fsdp=2", inside=2),
    ],
    ids=["fsdp", "pipeline", "tensor", "graph", "allreduce", "a mesh in a worker"],
)
def test_the_model_shows_what_was_trained(group: ProcessGroup) -> None:
    ((want, _, _),) = run_process_group(ProcessGroup(), program, 8).values
    replicas = 2 if group.strategy in ("fsdp", "allreduce") or "fsdp" in group.mesh else 1
    several = run_process_group(group, program, 8 // replicas).values
    for rank, (shown, evaluated, by_hand) in enumerate(several):
        for moment, found in shown.items():
            if found:
                assert found == pytest.approx(want[moment], abs=1e-5), (rank, moment)
        assert evaluated == pytest.approx(by_hand, abs=1e-5)
        assert len(shown) > 4 or rank


def test_there_is_no_model_before_the_block() -> None:
    session = trireme.Session(made(), nn.MSELoss(), lambda p: torch.optim.SGD(p, lr=0.1))
    with pytest.raises(ConfigurationError, match="use `with session:`"):
        _ = session.model
