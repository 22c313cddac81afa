"""Models of random expressions: repeated, dead, random, constant and in-place parts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import nn

WIDTH = 4


class Expressions(nn.Module):
    """Computes steps one after the other, each from values before it.

    Values are float64, of shape (N, WIDTH), and stay small. Steps that nothing reads are dead;
    those of the same kind and places, with no change in between, are repeated.

    Args:
        steps: the steps.
        outputs: how many of the last values it returns.
    """

    def __init__(self, steps: Sequence[Step], outputs: int) -> None:
        super().__init__()
        self.steps = tuple(steps)
        self.outputs = outputs
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.4)
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.fixed = torch.linspace(-1, 1, WIDTH, dtype=torch.float64)
        self.double()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = [x * 0.5, self.linear(x)]
        for step in self.steps:
            first, second = values[step.first % len(values)], values[step.second % len(values)]
            values.append(KINDS[step.kind](self, first, second))
        return tuple(values[-self.outputs :])


@dataclass(frozen=True)
class Step:
    """One step: of a kind of `KINDS`, and the places of the values that it reads."""

    kind: str
    first: int
    second: int


Operation = Callable[[Expressions, torch.Tensor, torch.Tensor], torch.Tensor]


def constant(self: Expressions, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return torch.tanh(first * (torch.arange(WIDTH) * 2.0 + 1))


def literal(self: Expressions, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return torch.tanh(first + torch.tensor([1.0, 2.0, 3.0, 4.0]).flip(0))


def changed_constant(self: Expressions, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(WIDTH, dtype=torch.float64)
    total.add_(1)
    total[1:] += second.detach().mean()
    return torch.tanh(first * total)


def before_and_after(self: Expressions, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    changing = first * 0.5
    part = changing[:, :2]
    before, halves = changing + 1, part + 1
    changing.add_(second)
    after = torch.cat([halves, part + 1], 1)
    return (before + (changing + 1) + after) / 8


def through_a_view(self: Expressions, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    one, other = first * 0.5, first * 0.5  # equal, and only one of them changes
    one.view(-1)[1:].mul_(0.25)
    one[:, :2] += second[:, 2:]
    return (one + other) / 2


def in_place(self: Expressions, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    fresh = first + 0.1
    return torch.relu_(fresh)


def counted(self: Expressions, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        self.seen.mul_(0.5).add_(first.mean(0))
    return torch.tanh(second + self.seen.clone())


def steady(self: Expressions, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        fixed = torch.tanh(first * 2)
    return (fixed + second) / 2


def halves(self: Expressions, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    low, high = first.chunk(2, dim=1)
    return torch.cat([high, low], 1)


KINDS: dict[str, Operation] = {
    "add": lambda self, first, second: (first + second) / 2,
    "multiply": lambda self, first, second: torch.tanh(first * second),
    "sine": lambda self, first, second: first.sin(),
    "linear": lambda self, first, second: self.linear(first),
    "weight": lambda self, first, second: torch.tanh(first @ (self.linear.weight * 2)),
    "fixed": lambda self, first, second: first * self.fixed,
    "dtype": lambda self, first, second: torch.tanh(first + first.detach().float() * 1),
    "detach": lambda self, first, second: (first.detach() + second) / 2,
    "dropout": lambda self, first, second: self.dropout(first) / 2,
    "noise": lambda self, first, second: (first + torch.rand_like(second)) / 2,
    "batch norm": lambda self, first, second: torch.tanh(self.norm(first)),
    "halves": halves,
    "constant": constant,
    "literal": literal,
    "changed constant": changed_constant,
    "before and after": before_and_after,
    "through a view": through_a_view,
    "in place": in_place,
    "counted": counted,
    "steady": steady,
}


@st.composite
def expressions(draw: st.DrawFn) -> Expressions:
    """Draws a model, with the same weights each time; about every fourth step is a repetition."""
    # Not drawn one by one: most kinds of steps would be in none of some hundred models.
    rng = random.Random(draw(st.integers(0, 1 << 32)))
    steps: list[Step] = []
    for _ in range(draw(st.integers(2, 6))):
        fresh = Step(rng.choice(sorted(KINDS)), rng.randrange(8), rng.randrange(8))
        steps.append(rng.choice(steps) if steps and rng.random() < 0.25 else fresh)
    torch.manual_seed(0)
    return Expressions(steps, draw(st.integers(1, 3)))
