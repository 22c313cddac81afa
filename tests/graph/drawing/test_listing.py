"""Graphs as text: an operator a line, below the name of its module."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from trireme.graph.capture.capture import capture
from trireme.graph.capture.optimise import optimise
from trireme.graph.drawing.listing import listing, summary


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 6), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 1


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low, _ = self.block(x * 2).chunk(2, dim=1)
        return low * (torch.arange(3) + 1)


def test_operators_are_below_their_modules_with_shape_and_line() -> None:
    lines = listing(capture(Model(), [torch.ones(4, 4)]).module.graph).splitlines()
    first = inspect.getsourcelines(Model.forward)[1]
    size = lines[0].split("[")[1].split(",")[0]  # the symbol of the batch size
    assert lines[0] == f"mul  aten.mul.Tensor  float32[{size}, 4]  {__file__}:{first + 1}"
    assert lines[1:4] == ["block", "  inner", "    0"]
    assert lines[4].startswith(f"      linear  aten.linear  float32[{size}, 6]  ")
    assert lines[5] == "    1"
    assert lines[6].startswith("      relu  aten.relu  ")
    added = inspect.getsourcelines(Block.forward)[1] + 1
    assert lines[7] == "block"  # it goes on
    assert lines[8] == f"  add  aten.add.Tensor  float32[{size}, 6]  {__file__}:{added}"
    pair = f"(float32[{size}, 3], float32[{size}, 3])"
    assert lines[9] == f"chunk  aten.chunk  {pair}  {__file__}:{first + 1}"
    assert lines[10].startswith(f"getitem  getitem  float32[{size}, 3]  ")


def test_the_summary_has_the_counts_of_each_pass() -> None:
    result = optimise(capture(Model(), [torch.ones(4, 4)]))
    # mul, linear, relu, add, chunk, two items of which one is dead, arange, add, mul
    assert summary(result.passes).splitlines() == [
        "dead code              10 -> 9",
        "constants              9 -> 7",
        "attributes             3 -> 3",
        "common subexpressions  7 -> 7",
    ]
