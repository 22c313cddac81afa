"""A second optimizer, which the job was not given: where workers have copies, one warning."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

from tests.harness import Cluster, run_job
from trireme.session.session import Session

BATCH = (torch.ones(8, 4), torch.zeros(8, 1))


class TwoHeads(nn.Module):
    """A model of which the job's optimizer has one part."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.teacher = nn.Linear(4, 2), nn.Linear(2, 1), nn.Linear(2, 1)
        self.teacher.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(self.body(inputs))
        return outputs


def warnings(cluster: Cluster, *, second: bool = False, adds: bool = False) -> list[list[str]]:
    """What each worker is told, where the program steps a second optimizer, or adds to its own."""

    def program(session: Session) -> list[str]:
        lines: list[str] = []
        model = session.model
        assert isinstance(model, TwoHeads)
        other = torch.optim.SGD(model.head.parameters(), lr=0.1)
        with mock.patch.object(session.worker.progress, "warn", lines.append):
            for step in range(4):
                if adds and step == 2:
                    session.optimizer.add_param_group({"params": list(model.head.parameters())})
                session.step(BATCH)
                with torch.no_grad():  # a moving average of one's own trains nothing
                    model.teacher.weight.lerp_(model.head.weight, 0.1)
                if second:
                    other.step()
        return lines

    def session(worker: int) -> Session:
        model = TwoHeads()
        sgd = torch.optim.SGD(model.body.parameters(), lr=0.1)
        return Session(model, nn.functional.mse_loss, sgd, max_steps=4 * cluster.workers)

    return run_job(cluster, session, program).values


@pytest.mark.parametrize("servers", [1, 2])
def test_what_a_second_optimizer_trains_on_each_worker_alone_is_named_once(servers: int) -> None:
    chief, other = warnings(Cluster(2, servers, "async"), second=True)
    assert len(chief) == 1 and not other
    assert "trains parameter 'head.weight' by an optimizer that the job was not given" in chief[0]


def test_nothing_is_said_where_there_is_none() -> None:
    assert warnings(Cluster(2, 1, "async")) == [[], []]


@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_nothing_is_said_of_what_is_added_to_the_optimizer_of_the_job(strategy: str) -> None:
    assert warnings(Cluster(2, 1, strategy), adds=True) == [[], []]


@pytest.mark.parametrize("servers", [0, 1])
def test_a_worker_alone_may_have_one(servers: int) -> None:
    strategy = "async" if servers else None
    assert warnings(Cluster(1, servers, strategy), second=True) == [[]]
