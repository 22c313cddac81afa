"""Models of random shapes: branches, skips, shared parameters, several outputs, batch norm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import nn

WIDTH = 6

UNARY = ("linear", "shared", "batch_norm", "relu", "relu_", "tanh", "scale", "chunk")
BINARY = ("add", "multiply", "join", "add_")


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
                layers[str(number)] = nn.BatchNorm1d(WIDTH)
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
            return fresh
        if kind == "scale":
            return first * self.scale
        if kind == "chunk":
            low, high = first.chunk(2, dim=1)
            return torch.cat([high, low.reshape(first.shape[0], -1)], 1)
        simple = {"relu": torch.relu, "tanh": torch.tanh}
        if kind in simple:
            return simple[kind](first)
        return first + second if kind == "add" else torch.tanh(first * second)


@st.composite
def models(draw: st.DrawFn) -> tuple[tuple[Step, ...], int]:
    """Draws the arguments of a `RandomModel` that has parameters."""
    step = st.builds(
        Step, st.sampled_from(UNARY + BINARY), st.integers(0, 5), st.integers(0, 5)
    )
    steps = draw(st.lists(step, min_size=1, max_size=12))
    return (Step("linear", 0, 0), *steps), draw(st.integers(1, 3))
