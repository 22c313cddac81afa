"""Every optimizer of the registry, on the servers' flat vectors, against torch's own on tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.harness import Cluster
from tests.parity.plain import OptimizerFactory, difference, train
from tests.parity.problems import EXACT, same_everywhere, small, trained
from trireme.ps.optimizers import OPTIMIZERS


def of(make: Callable[..., torch.optim.Optimizer], **options: Any) -> OptimizerFactory:
    return lambda params: make(params, **options)


CASES = {
    "SGD": of(torch.optim.SGD, lr=0.1),
    "SGD momentum": of(torch.optim.SGD, lr=0.1, momentum=0.9),
    "SGD nesterov": of(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "SGD dampening decay": of(
        torch.optim.SGD, lr=0.1, momentum=0.8, dampening=0.3, weight_decay=0.01
    ),
    "SGD maximize": of(torch.optim.SGD, lr=0.01, maximize=True),
    "Adam": of(torch.optim.Adam, lr=0.01),
    "Adam amsgrad decay": of(torch.optim.Adam, lr=0.01, amsgrad=True, weight_decay=0.01),
    "AdamW": of(torch.optim.AdamW, lr=0.01, betas=(0.8, 0.99)),
    "Adagrad": of(torch.optim.Adagrad, lr=0.1),
    "Adagrad decay": of(
        torch.optim.Adagrad, lr=0.1, lr_decay=0.05, initial_accumulator_value=0.1, weight_decay=0.01
    ),
    "RMSprop": of(torch.optim.RMSprop, lr=0.01),
    "RMSprop centered": of(torch.optim.RMSprop, lr=0.01, centered=True, momentum=0.9),
    "Adadelta": of(torch.optim.Adadelta, lr=1.0, weight_decay=0.01),
    "NAdam": of(torch.optim.NAdam, lr=0.01, weight_decay=0.01),
    "RAdam": of(torch.optim.RAdam, lr=0.05),
    "Adamax": of(torch.optim.Adamax, lr=0.01),
    "ASGD": of(torch.optim.ASGD, lr=0.1, t0=3),
    "Rprop": of(torch.optim.Rprop, lr=0.01),
}


def test_every_optimizer_of_the_registry_is_here() -> None:
    assert {name.split()[0] for name in CASES} == set(OPTIMIZERS)


@pytest.mark.slow(one_in=2)
@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_sync_equals_one_process(make: OptimizerFactory) -> None:
    problem = small()
    values = same_everywhere(trained(problem, make, Cluster(2, 2, "sync")))
    assert difference(values, train(problem, make).values) < EXACT


@pytest.mark.slow(one_in=2)
@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_async_with_one_worker_equals_one_process(make: OptimizerFactory) -> None:
    problem = small()
    (values,) = trained(problem, make, Cluster(1, 1, "async"))
    assert difference(values, train(problem, make).values) < EXACT


@pytest.mark.slow(one_in=2)
@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_without_servers_every_bit_is_the_same(make: OptimizerFactory) -> None:
    problem = small(dtype=torch.float32)
    (values,) = trained(problem, make, Cluster(1, 0))
    assert difference(values, train(problem, make).values) == 0.0
