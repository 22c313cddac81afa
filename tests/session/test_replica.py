"""Replicas run backward as torch does, whatever the loss is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trireme.errors import ConfigurationError
from trireme.ps.dense import FlatModel
from trireme.session.options import make_options
from trireme.session.replica import Loss, Replica

INPUTS, TARGETS = torch.randn(12, 8), torch.arange(12) % 3
LOSS: Loss = nn.CrossEntropyLoss()


class Checkpointed(nn.Sequential):
    def forward(self, inputs: torch.Tensor) -> Any:
        return checkpoint(super().forward, inputs, use_reentrant=False)


class Marked(torch.Tensor):
    """A subclass, of which torch calls Python for every operation."""


def marked_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss = LOSS(outputs, targets).as_subclass(Marked)
    assert type(loss) is Marked
    return loss


def make_model(kind: Callable[..., nn.Module] = nn.Sequential) -> nn.Module:
    torch.manual_seed(3)
    return kind(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def make_replica(model: nn.Module, loss: Loss = LOSS, **options: Any) -> Replica:
    flat = FlatModel([list(model.named_parameters())], servers=1)
    return Replica(model, loss, flat, make_options(options), {})


def plain_gradients() -> list[torch.Tensor]:
    model = make_model()
    torch.autograd.backward(LOSS(model(INPUTS), TARGETS))
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("keeps_views", [True, False])
@pytest.mark.parametrize(
    ("kind", "loss"),
    [(nn.Sequential, LOSS), (nn.Sequential, marked_loss), (Checkpointed, LOSS)],
)
def test_the_gradient_is_torchs_to_the_bit(kind: Any, loss: Loss, keeps_views: bool) -> None:
    model = make_model(kind)
    replica = make_replica(model, loss)
    flat: Any = replica.flat
    flat.keeps_views = keeps_views
    for _ in range(2):
        result = replica.backward((INPUTS, TARGETS))
        assert result.examples == len(INPUTS)
        got = [p.grad for p in model.parameters()]
        assert all(map(torch.equal, got, plain_gradients()))


def test_hooks_run_and_their_exceptions_come_out_as_they_are() -> None:
    model = make_model()
    replica = make_replica(model)
    seen: list[int] = []
    weight = next(model.parameters())
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.numel()))
    replica.backward((INPUTS, TARGETS))
    assert seen == [128]

    def fail(gradient: torch.Tensor) -> None:
        raise KeyError("a hook's own")

    weight.register_hook(fail)
    with pytest.raises(KeyError, match="a hook's own"):
        replica.backward((INPUTS, TARGETS))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_loss_that_depends_on_nothing_trained_is_said(accumulate: int) -> None:
    def detached(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs.detach(), targets)

    replica = make_replica(make_model(), detached, accumulate=accumulate)
    with pytest.raises(ConfigurationError, match="depends on no parameter that is trained"):
        replica.backward((INPUTS, TARGETS))
