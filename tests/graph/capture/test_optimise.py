"""Optimised graphs compute the same, with exactly the operators that are left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.graph.equality import assert_same
from tests.graph.random_expressions import WIDTH, Expressions, expressions
from trireme.graph.capture.capture import capture
from trireme.graph.capture.optimise import optimised


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


def operators(graph: torch.fx.Graph) -> int:
    return sum(node.op == "call_function" for node in graph.nodes)


def counts(function: Callable[..., Any], training: bool = True) -> tuple[int, int]:
    """The operators before and after; the graph was compared with the model at two batch sizes."""
    model = Calling(function).train(training)
    captured = capture(model, [torch.randn(4, 4)])
    result = optimised(captured)
    batches = [[torch.randn(4, 4)], [torch.randn(7, 4)]]
    assert_same(result, model, *batches, tolerance=1e-6)
    return operators(captured.module.graph), operators(result.module.graph)


def test_counts_are_exact() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x.exp()  # dead, and what it alone needs
        x.sin().cos()
        scale = torch.arange(4) * 2.0 + 1  # three operators on constants
        return (self.linear(x).relu() + self.linear(x).relu()) * scale

    # linear, relu, add, mul are left: the second linear and relu are merged.
    assert counts(forward) == (12, 4)


@pytest.mark.parametrize(
    ("function", "merged"),
    [
        (lambda self, x: (self.dropout(x) * self.dropout(x)) + 1, 0),
        (lambda self, x: (torch.rand_like(x) - torch.rand_like(x)) + x, 0),
        (lambda self, x: (self.norm(x) * self.norm(x)) + 1, 0),
        (lambda self, x: ((x.long() + 1) / 2 - (x.long() + 1.0)) + 1, 1),
        (lambda self, x: (x.sin() * x.sin()) + 1, 1),
        (lambda self, x: (x.sin(), x.sin()), 0),
    ],
    ids=["dropout", "random", "batch norm", "dtype", "same", "returned"],
)
def test_what_is_merged(function: Callable[..., Any], merged: int) -> None:
    before, after = counts(function)
    assert before - after == merged


def test_values_before_and_after_a_change_are_not_merged() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).clone()
        before = y * 2  # autograd saves nothing of y, so that y may change
        y.add_(1)
        return before + y * 2 + 0

    assert counts(forward) == (7, 7)


def test_copies_of_which_one_changes_are_not_merged() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        one, other = x.clone(), x.clone()
        one.view(-1).add_(1)
        return one * other + 0

    before, after = counts(forward)
    assert before == after


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_dead_batch_norm_and_dropout_stay_in_training_alone(training: bool) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.dropout(self.norm(x))
        return self.dropout(self.linear(x))

    before, after = counts(forward, training)
    assert before - after == (0 if training else 2)


def test_parameters_and_changed_constants_are_not_folded() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(4)
        total.add_(1)
        return x * (self.linear.weight * 2).sum() * total

    before, after = counts(forward)
    assert before == after


def test_equal_constants_are_one() -> None:
    assert counts(lambda self, x: (x + torch.ones(4)) * (x + torch.ones(4)) + 1) == (6, 3)


CHANGING = ("add_", "mul_", "relu_", "copy_", "batch_norm", "rand_like")


def lasting(graph: torch.fx.Graph, training: bool) -> Counter[str]:
    """How often each operator occurs that draws random numbers or changes memory."""
    names = (*CHANGING, "dropout") if training else CHANGING[:4] + CHANGING[5:]
    found = [str(node.target).split(".") for node in graph.nodes if node.op == "call_function"]
    return Counter(name[1] for name in found if name[0] == "aten" and name[1] in names)


def rows_of(size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, WIDTH, dtype=torch.float64, generator=generator)


@pytest.mark.thorough
@settings(max_examples=8, deadline=None)
@given(model=expressions(), training=st.booleans())
def test_random_graphs_compute_the_same(model: Expressions, training: bool) -> None:
    check_that_it_computes_the_same(model, training)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(model=expressions(), training=st.booleans())
def test_many_random_graphs_compute_the_same(model: Expressions, training: bool) -> None:
    check_that_it_computes_the_same(model, training)


def check_that_it_computes_the_same(model: Expressions, training: bool) -> None:
    """Fails if the captured or the optimised graph differs from the model."""
    model.train(training)
    batches = [[rows_of(4)], [rows_of(7)]]
    captured = capture(model, batches[0], verify=False)
    assert captured.batch.dynamic
    assert_same(captured, model, *batches)
    result = optimised(captured)
    # A value that was merged has one gradient, which autograd sums in another order.
    assert_same(result, model, *batches, gradients=1e-6)
    before, after = captured.module.graph, result.module.graph
    assert lasting(before, training) == lasting(after, training)
    assert operators(after) <= operators(before)
