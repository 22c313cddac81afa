"""A graph that is older than the newest values is refused by backward, as after any optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import trireme
from tests.harness import Cluster, run_job
from tests.process_groups import ProcessGroup, run_process_group
from trireme.session.session import Session

STALE = "modified by an inplace operation"


class Remembering(nn.Module):
    """Keeps a hidden state with its graph, which the next step's loss reaches for the first time.

    In the first step `late` takes part in nothing that is differentiated; the hidden state has
    been computed from the values before the first update.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.early = nn.Parameter(torch.randn(3))
        self.late = nn.Parameter(torch.randn(3))
        self.hidden: torch.Tensor | None = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        before, self.hidden = self.hidden, self.early * self.late
        outputs = inputs * self.early
        return outputs if before is None else outputs + before


def mean(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()


BATCH = (torch.ones(2, 3), torch.zeros(2, 3))


def test_plain_torch_refuses_it() -> None:
    model = Remembering()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mean(model(BATCH[0]), BATCH[1]).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=STALE):
        mean(model(BATCH[0]), BATCH[1]).backward()


def session(index: int = 0) -> Session:
    return trireme.Session(
        Remembering(), mean, lambda params: torch.optim.SGD(params, lr=0.1), max_steps=5
    )


def two_steps(joined: Session) -> None:
    for _ in range(2):
        joined.step(BATCH)


@pytest.mark.parametrize(
    "cluster",
    [
        Cluster(servers=0),
        Cluster(),
        Cluster(servers=2, strategy="sync"),
        Cluster(prefetch=True),
        Cluster(scheme="shm"),
        Cluster(strategy="averaging", every=2),
    ],
    ids=str,
)
def test_a_session_refuses_it(cluster: Cluster) -> None:
    def program(joined: Session) -> None:
        two_steps(joined)
        if cluster.prefetch:  # whose values arrive one step later
            joined.step(BATCH)

    ran = run_job(cluster, session, program)
    assert STALE in str(ran.raised[0])


def retained() -> str:
    """A loop that goes a second time through the graph of a step, as some programs of a GAN do."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer = trireme.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss: Any = model(torch.ones(2, 3)).square().mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    finally:
        optimizer.close()
    return "it went through"


@pytest.mark.parametrize(
    "group",
    [
        ProcessGroup(),
        ProcessGroup(workers=2),
        ProcessGroup(workers=2, servers=1, strategy="sync"),
        ProcessGroup(servers=1, mesh="dp=2", inside=2),
    ],
    ids=["alone", "allreduce", "sync", "a mesh in a worker"],
)
def test_a_loop_of_the_programs_own_is_refused(group: ProcessGroup) -> None:
    for said in run_process_group(group, retained).values:
        assert STALE in said
