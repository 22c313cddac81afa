"""Models of random shapes: branches, skips, shared parameters, several outputs, batch norm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import nn

WIDTH = 6

UNARY = ("linear", "shared", "shared", "batch_norm", "relu", "relu_", "tanh", "scale", "chunk")
BINARY = ("add", "multiply", "join", "add_", "stack", "stack", "expand", "split")


@dataclass(frozen=True)
class Step:
    """One step of a random model.

    Attributes:
        kind: what it computes: of `UNARY` or `BINARY`.
        first, second: which earlier values it reads, counted from the newest.
    """

    kind: str
    first: int
    second: int


class RandomModel(nn.Module):
    """Computes steps one after the other, each from values before it.

    Sums and products go through tanh, and batch norm has a large epsilon: else some models amplify
    the errors of rounding without bound.

    Args:
        steps: the steps.
        outputs: how many of the last values it returns: one as a tensor, several as a dict.
    """

    def __init__(self, steps: Sequence[Step], outputs: int) -> None:
        super().__init__()
        self.steps = tuple(steps)
        self.outputs = outputs
        shared = nn.Linear(WIDTH, WIDTH)
        layers: dict[str, nn.Module] = {}
        for number, step in enumerate(self.steps):
            if step.kind in ("linear", "shared", "join"):
                own = nn.Linear(WIDTH * (2 if step.kind == "join" else 1), WIDTH)
                layers[str(number)] = shared if step.kind == "shared" else own
            elif step.kind == "batch_norm":
                layers[str(number)] = nn.BatchNorm1d(WIDTH, eps=0.1)
        self.layers = nn.ModuleDict(layers)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(
        self, left: torch.Tensor, right: torch.Tensor
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        values = [left, right]
        for number, step in enumerate(self.steps):
            first = values[-1 - step.first % len(values)]
            second = values[-1 - step.second % len(values)]
            values.append(self._compute(str(number), step.kind, first, second))
        last = values[-self.outputs :]
        if self.outputs == 1:
            return last[0]
        return {f"output {number}": value for number, value in enumerate(last)}

    def _compute(
        self, number: str, kind: str, first: torch.Tensor, second: torch.Tensor
    ) -> torch.Tensor:
        if kind in ("linear", "shared", "batch_norm"):
            result: torch.Tensor = self.layers[number](first)
            return result
        if kind == "join":
            joined: torch.Tensor = self.layers[number](torch.cat([first, second], 1))
            return joined
        if kind == "relu_":  # of a fresh value: what autograd has saved stays as it is
            return torch.relu_(first + 0.1)
        if kind == "add_":
            fresh = first * 0.5
            fresh += second
            return torch.tanh(fresh)
        if kind == "scale":
            return first * self.scale
        if kind == "chunk":
            low, high = first.chunk(2, dim=1)
            return torch.cat([high, low.reshape(first.shape[0], -1)], 1)
        if kind == "stack":  # its gradients have the same memory, as those of expand and split
            return torch.stack([first, second, first * 0.5, self.scale.expand_as(first)]).sum(0) / 4
        if kind == "expand":
            return torch.tanh(first.sum(0, keepdim=True).expand_as(second) + second)
        if kind == "split":
            parts = torch.cat([first, second, first + second]).split(first.shape[0])
            return torch.tanh(parts[0] + parts[1] + parts[2])
        simple = {"relu": torch.relu, "tanh": torch.tanh}
        if kind in simple:
            return simple[kind](first)
        return torch.tanh(first + second if kind == "add" else first * second)


@st.composite
def models(draw: st.DrawFn) -> tuple[tuple[Step, ...], int]:
    """Draws the arguments of a `RandomModel` that has parameters."""
    step = st.builds(Step, st.sampled_from(UNARY + BINARY), st.integers(0, 5), st.integers(0, 5))
    steps = draw(st.lists(step, min_size=1, max_size=7))
    return (Step("linear", 0, 0), *steps), draw(st.integers(1, 3))
