"""One plain PyTorch process: what every mode of Trireme is compared with. Only torch in here."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]
OptimizerFactory = Callable[[Any], torch.optim.Optimizer]
Values = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Problem:
    """A network with its first values, and the batches of all workers together, step by step."""

    model: nn.Module
    batches: Sequence[Batch]

    def copy(self) -> nn.Module:
        """A model with the first values, to be trained."""
        return copy.deepcopy(self.model)

    def shares(self, workers: int) -> list[list[Batch]]:
        """For each worker its part of each batch, all of the same size."""
        return [
            [(x.chunk(workers)[w], y.chunk(workers)[w]) for x, y in self.batches]
            for w in range(workers)
        ]


@dataclass(frozen=True)
class Recipe:
    """What goes on around a plain step.

    Attributes:
        clip_norm: passed to `clip_grad_norm_`.
        l2: adds l2 / 2 times the squares of the weights, biases left out, to the loss.
        scheduler: builds the learning rate's schedule.
        decay: of a moving average of the parameters, by the number of the step, from 1.
    """

    clip_norm: float | None = None
    l2: float = 0.0
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    decay: Callable[[int], float] | None = None


@dataclass
class Trained:
    """The values after the last step, and their moving average."""

    values: Values
    average: Values


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets)


def train(problem: Problem, make: OptimizerFactory, recipe: Recipe = Recipe()) -> Trained:
    """Trains in the most ordinary way: one batch, one backward, one step."""
    model = problem.copy()
    optimizer = make(model.parameters())
    scheduler = recipe.scheduler(optimizer) if recipe.scheduler else None
    average = values_of(model)
    for step, (inputs, targets) in enumerate(problem.batches, 1):
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        if recipe.l2:
            squares = [(p**2).sum() for p in model.parameters() if p.dim() >= 2]
            loss = loss + recipe.l2 / 2 * torch.stack(squares).sum()
        loss.backward()
        if recipe.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if recipe.decay is not None:
            decay, now = recipe.decay(step), values_of(model)
            average = {name: decay * average[name] + (1 - decay) * now[name] for name in average}
    return Trained(values_of(model), average)


def gradients(model: nn.Module, batch: Batch) -> list[torch.Tensor]:
    """The gradient of the mean loss of one batch."""
    loss = loss_of(model(batch[0]), batch[1])
    return list(torch.autograd.grad(loss, list(model.parameters())))


def train_in_parts(
    problem: Problem, make: OptimizerFactory, rounds: Iterable[Sequence[Batch]]
) -> Values:
    """Trains with the mean of several gradients a step, added in the order in which they stand."""
    model = problem.copy()
    optimizer = make(model.parameters())
    for batches in rounds:
        parts = [gradients(model, batch) for batch in batches]
        for parameter, *terms in zip(model.parameters(), *parts, strict=True):
            parameter.grad = sum(terms[1:], terms[0]) / len(terms)
        optimizer.step()
    return values_of(model)


def values_of(model: nn.Module) -> Values:
    """Copies of the parameters, by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def difference(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """The largest difference between two elements of the same place."""
    assert one.keys() == other.keys()
    assert all(value.isfinite().all() for value in (*one.values(), *other.values()))
    return max(float((one[name] - other[name]).abs().max()) for name in one)
