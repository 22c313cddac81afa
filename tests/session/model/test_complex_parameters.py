"""Complex parameters are refused in true words, and train as pairs of real numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import trireme
from tests.harness import Cluster, run_job
from trireme.errors import ConfigurationError
from trireme.session.session import Session

INPUTS = torch.linspace(-1, 1, 12).reshape(3, 4)
FIRST = torch.complex(torch.linspace(-1, 1, 4), torch.linspace(1, 2, 4))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.Parameter(FIRST.clone())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs * self.factors).abs()


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.view_as_real(FIRST.clone()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs * torch.view_as_complex(self.factors)).abs()


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.1),
}


@pytest.mark.parametrize("cluster", [Cluster(servers=0)], ids=str)
def test_they_are_refused_in_true_words(cluster: Cluster) -> None:
    def make(index: int) -> Session:
        return trireme.Session(Complex(), loss, OPTIMIZERS["sgd"])

    error = run_job(cluster, make, lambda session: None).raised[0]
    assert isinstance(error, ConfigurationError)
    assert "'factors' has dtype complex64, which no strategy trains" in str(error)
    assert "torch.view_as_real" in str(error)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("cluster", [Cluster(servers=0), Cluster(strategy="sync")], ids=str)
def test_pairs_of_reals_train_bit_equal(cluster: Cluster, name: str) -> None:
    plain = Complex()
    optimizer = OPTIMIZERS[name](plain.parameters())
    for _ in range(5):
        optimizer.zero_grad()
        loss(plain(INPUTS), torch.ones(3, 4)).backward()
        optimizer.step()

    def program(session: Session) -> torch.Tensor:
        for _ in range(5):
            session.step((INPUTS, torch.ones(3, 4)))
        return session.model.get_parameter("factors").detach().clone()

    def make(index: int) -> Session:
        return trireme.Session(Pairs(), loss, OPTIMIZERS[name], max_steps=9)

    (found,) = run_job(cluster, make, program).values
    assert torch.equal(torch.view_as_complex(found), plain.factors.detach())
