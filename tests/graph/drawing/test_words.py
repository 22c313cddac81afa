"""Nodes as words, and the counts of passes."""

from __future__ import annotations

import torch
from torch import nn

from trireme.graph.capture.capture import capture
from trireme.graph.capture.optimise import optimise
from trireme.graph.drawing.words import operator_name, shape_text


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


def test_nodes_as_words() -> None:
    graph = capture(Model(), [torch.ones(4, 4)]).module.graph
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    shapes = [shape_text(node.meta["val"]) for node in nodes]
    size = shapes[0].split("[")[1].split(",")[0]  # the symbol of the batch size
    assert shapes[0] == f"float32[{size}, 4]"
    pair = f"(float32[{size}, 3], float32[{size}, 3])"
    assert [(operator_name(node), shape) for node, shape in zip(nodes, shapes, strict=True)][
        3:6
    ] == [
        ("aten.add.Tensor", f"float32[{size}, 6]"),
        ("aten.chunk", pair),
        ("getitem", f"float32[{size}, 3]"),
    ]


def test_each_pass_counts_operators() -> None:
    result = optimise(capture(Model(), [torch.ones(4, 4)]))
    # mul, linear, relu, add, chunk, two items of which one is dead, arange, add, mul
    assert [(each.name, each.before, each.after) for each in result.passes] == [
        ("dead code", 10, 9),
        ("common subexpressions", 9, 9),
        ("constants", 9, 7),
    ]
