"""Optimised graphs compute the same, with exactly the operators that are left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.graph.equality import assert_same
from trireme.graph.capture import capture
from trireme.graph.optimise import Optimised, PassCount, optimise


class Calling(nn.Module):
    """A module whose forward is a function of the module and its input."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def optimised(function: Callable[..., Any], training: bool = True) -> Optimised:
    """The optimised graph, which was compared with the model at two batch sizes."""
    model = Calling(function).train(training)
    result = optimise(capture(model, [torch.randn(4, 4)]))
    batches = [[torch.randn(4, 4)], [torch.randn(7, 4)]]
    assert_same(result.capture, model, *batches, tolerance=1e-6)
    return result


def counts(result: Optimised) -> list[tuple[int, int]]:
    return [(each.before, each.after) for each in result.passes]


def test_counts_are_exact() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x.exp()  # dead, and what it alone needs
        x.sin().cos()
        scale = torch.arange(4) * 2.0 + 1  # three operators on constants
        return (self.linear(x).relu() + self.linear(x).relu()) * scale

    result = optimised(forward)
    # linear, relu, linear, relu, add, mul; the second linear and relu are merged.
    assert result.passes == (
        PassCount("dead code", 12, 9),
        PassCount("constants", 9, 6),
        PassCount("common subexpressions", 6, 4),
    )


@pytest.mark.parametrize(
    ("function", "merged"),
    [
        (lambda self, x: (self.dropout(x) * self.dropout(x)) + 1, 0),
        (lambda self, x: (torch.rand_like(x) - torch.rand_like(x)) + x, 0),
        (lambda self, x: (self.norm(x) * self.norm(x)) + 1, 0),
        (lambda self, x: ((x.long() + 1) * 0.5 / (x.long() + 1.0)) + 1, 1),
        (lambda self, x: (x.sin() * x.sin()) + 1, 1),
        (lambda self, x: (x.sin(), x.sin()), 0),
    ],
    ids=["dropout", "random", "batch norm", "dtype", "same", "returned"],
)
def test_what_is_merged(function: Callable[..., Any], merged: int) -> None:
    before, after = counts(optimised(function))[2]
    assert before - after == merged


def test_values_before_and_after_a_change_are_not_merged() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).clone()
        before = y.sin()
        y.add_(1)
        return before * y.sin() + 0

    assert counts(optimised(forward))[2] == (7, 7)


def test_copies_of_which_one_changes_are_not_merged() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        one, other = x.clone(), x.clone()
        one.view(-1).add_(1)
        return one * other + 0

    before, after = counts(optimised(forward))[2]
    assert before == after


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_dead_batch_norm_and_dropout_stay_in_training_alone(training: bool) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.dropout(self.norm(x))
        return self.dropout(self.linear(x))

    before, after = counts(optimised(forward, training))[0]
    assert before - after == (0 if training else 2)


def test_parameters_and_changed_constants_are_not_folded() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(4)
        total.add_(1)
        return x * (self.linear.weight * 2).sum() * total

    before, after = counts(optimised(forward))[1]
    assert before == after
