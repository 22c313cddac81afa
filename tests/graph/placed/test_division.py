"""A batch is computed in micro-batches only where its loss and gradients stay the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from trireme.graph.placed.division import divides
from trireme.session.loss import model_loss

CLASSES = 4


class Counting:
    """A loss that grows from call to call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return F.cross_entropy(outputs, targets) * self.calls


class Centred(nn.Module):
    """A layer that looks at the whole batch, in training mode only."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values - values.mean(0) if self.training else values


def chain(*more: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *more, nn.Linear(8, CLASSES))


def zero_head() -> nn.Module:
    model = chain()
    assert isinstance(model, nn.Sequential)
    for parameter in model[-1].parameters():
        nn.init.zeros_(parameter)
    return model


def batch(examples: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    targets = torch.arange(examples) % CLASSES
    return torch.randn(examples, 6, generator=generator), targets.sort().values


def probabilities(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    assert bool((outputs >= 0).all())
    return F.nll_loss(outputs.log(), targets)


MEANS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "cross-entropy": (chain, nn.CrossEntropyLoss()),
    "one number in a list": (chain, lambda o, t: F.cross_entropy(o, t)[None]),
    "of probabilities": (lambda: nn.Sequential(chain(), nn.Softmax(1)), probabilities),
    "dropout": (lambda: chain(nn.Dropout(0.5)), nn.CrossEntropyLoss()),
    "squares": (chain, lambda o, t: (o - t[:, None]).pow(2).mean()),
}

OTHERS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "a sum": (chain, nn.CrossEntropyLoss(reduction="sum")),
    "weights of classes": (chain, nn.CrossEntropyLoss(weight=torch.arange(1.0, CLASSES + 1))),
    "weights, where all outputs are equal": (
        zero_head,
        nn.CrossEntropyLoss(weight=torch.arange(1.0, CLASSES + 1) ** 2),
    ),
    "ignored targets": (chain, nn.CrossEntropyLoss(ignore_index=0)),
    "a loss within the batch": (chain, lambda o, t: F.cross_entropy(o @ o.T, torch.arange(len(o)))),
    "a loss that keeps state": (chain, Counting()),
    "a part cannot be computed": (chain, lambda o, t: (o.T - t.expand(4, 12)).pow(2).mean()),
    "a layer looks at the batch": (lambda: chain(Centred()), nn.CrossEntropyLoss()),
    "batch normalization": (lambda: chain(nn.BatchNorm1d(8)), nn.CrossEntropyLoss()),
}


@pytest.mark.parametrize("case", MEANS)
def test_a_mean_over_the_examples_divides(case: str) -> None:
    make, loss = MEANS[case]
    assert divides(make(), loss, batch(), 4)


@pytest.mark.parametrize("case", OTHERS)
def test_other_losses_do_not(case: str) -> None:
    make, loss = OTHERS[case]
    assert not divides(make(), loss, batch(), 4)


def test_a_models_own_loss_is_not_looked_at() -> None:
    assert not divides(chain(), model_loss, batch(), 4)


def test_model_and_loss_are_left_as_they_were() -> None:
    model, loss = chain(nn.BatchNorm1d(8), nn.Dropout(0.5)), Counting()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    divides(model, loss, batch(), 4)
    assert loss.calls == 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in model.modules())
