"""Replicas run backward as torch does, whatever the loss is."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trireme.errors import ConfigurationError
from trireme.ps.flat import FlatModel
from trireme.session.loss import Loss
from trireme.session.model.computation import Computation
from trireme.session.options import make_options

INPUTS, TARGETS = torch.randn(12, 8), torch.arange(12) % 3
LOSS: Loss = nn.CrossEntropyLoss()


class Checkpointed(nn.Sequential):
    def forward(self, inputs: torch.Tensor) -> Any:
        return checkpoint(super().forward, inputs, use_reentrant=False)


class Marked(torch.Tensor):
    """A subclass, of which torch calls Python for every function."""

    called: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.called.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def marked_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss = LOSS(outputs, targets).as_subclass(Marked)
    assert type(loss) is Marked
    return loss


def make_model(kind: Callable[..., nn.Module] = nn.Sequential) -> nn.Module:
    torch.manual_seed(3)
    return kind(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def make_replica(model: nn.Module, loss: Loss = LOSS, **options: Any) -> Computation:
    flat = FlatModel([list(model.named_parameters())], servers=1)
    return Computation(model, loss, flat, make_options(options), {})


def plain_gradients() -> list[torch.Tensor]:
    model = make_model()
    torch.autograd.backward(LOSS(model(INPUTS), TARGETS))
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("keeps_views", [True, False])
@pytest.mark.parametrize(
    ("kind", "loss"), [(nn.Sequential, LOSS), (nn.Sequential, marked_loss), (Checkpointed, LOSS)]
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


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(10, 3)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.bag(ids, offsets)
        return found


@pytest.mark.parametrize(
    "form", [tuple, lambda pair: dict(zip(("ids", "offsets"), pair, strict=True))]
)
def test_bags_count_as_examples_and_not_their_ids(form: Callable[[Any], Any]) -> None:
    bags = [[1, 2, 3], [4], [], [5, 6]], [[7], [8]]
    batches = []
    for each in bags:
        ids = torch.tensor([i for bag in each for i in bag])
        starts = torch.tensor([0, *map(len, each[:-1])]).cumsum(0)
        batches.append((form((ids, starts)), TARGETS[: len(each)]))
    replica = make_replica(model := Bags())
    assert [replica.backward(batch).examples for batch in batches] == [4, 2]
    joined = nn.functional.embedding_bag(
        torch.tensor([1, 2, 3, 4, 5, 6, 7, 8]), model.bag.weight, torch.tensor([0, 3, 4, 4, 6, 7])
    )
    expected = LOSS(joined, torch.cat([targets for _, targets in batches]))
    assert replica.evaluate(batches)["loss"] == pytest.approx(expected.item())


def test_a_subclass_of_tensor_is_asked_how_backward_is_run() -> None:
    Marked.called.clear()
    make_replica(make_model(), marked_loss).backward((INPUTS, TARGETS))
    assert torch.autograd.backward in Marked.called


def test_what_anomaly_mode_warns_of_is_a_warning_of_pythons() -> None:
    replica = make_replica(make_model(), lambda outputs, targets: (outputs * 0).sqrt().sum() * 0)
    with (
        torch.autograd.set_detect_anomaly(True, check_nan=True),
        pytest.warns(UserWarning, match="Error detected in SqrtBackward0"),
        pytest.raises(RuntimeError, match="returned nan values"),
    ):
        replica.backward((INPUTS, TARGETS))


def test_what_deterministic_mode_warns_of_is_a_warning_of_pythons() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")

        def scattered(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            flat = outputs.flatten()
            loss = flat.put(torch.arange(6), flat[6:12]).square().mean()
            seen.clear()  # what the forward pass warned of
            return loss

        replica = make_replica(make_model(), scattered)
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            replica.backward((INPUTS, TARGETS))
        finally:
            torch.use_deterministic_algorithms(False)
    assert any("put_ does not have a deterministic" in str(warning.message) for warning in seen)


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
