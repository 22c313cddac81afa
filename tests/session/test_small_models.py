"""Models so small that some servers have no part of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import trireme
from tests.harness import Cluster, run_job
from trireme.session.session import Session

INPUTS = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(INPUTS, INPUTS.sum(1, keepdim=True))


def make() -> Session:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    return trireme.Session(model, nn.functional.mse_loss, sgd, max_steps=20)


def train(session: Session) -> torch.Tensor:
    for batch in session.loader(DATA, 8):
        session.step(batch)
    return session.model.weight.detach().clone()  # type: ignore[union-attr,operator]


@pytest.mark.parametrize(
    "cluster",
    [
        Cluster(servers=4),
        Cluster(servers=4, strategy="sync"),
        Cluster(servers=4, scheme="shm"),
        Cluster(servers=4, scheme="tcp"),
    ],
    ids=str,
)
def test_a_model_of_five_numbers_trains_on_four_servers(cluster: Cluster) -> None:
    (alone,) = run_job(Cluster(servers=0), lambda _: make(), train).values
    (found,) = run_job(cluster, lambda _: make(), train).values
    torch.testing.assert_close(found, alone)


def test_its_packed_gradients_train_too() -> None:
    (found,) = run_job(Cluster(servers=4, compress="int8"), lambda _: make(), train).values
    torch.testing.assert_close(found, torch.ones(1, 4), atol=0.5, rtol=0.5)
