"""Pictures made by hand, and one of a model that is captured, placed and cut."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from torch import nn

from trireme.graph.capture.capture import capture
from trireme.graph.capture.optimise import PassCount, optimise
from trireme.graph.drawing.assembly import picture_of
from trireme.graph.drawing.picture import DeviceUse, Edge, Node, Picture, Transfer
from trireme.graph.execute.cut import cut
from trireme.graph.place.costs import CostGraph, Device, Hardware, Link, Operation
from trireme.graph.place.placement import Placement
from trireme.graph.place.prediction import predict

MB = 2**20


def operator(name: str, scope: str, place: str, depth: int | None = None) -> Node:
    return Node(
        name, "aten.linear", scope, "float32[s0, 10]", f"net.py:{len(name)}", place,
        0.001, 0.002, MB, 2 * MB, depth,
    )  # fmt: skip


def picture(model: str = "Net") -> Picture:
    """`a` and `block` on worker:0, `block.deep` split over both, `z` on worker:1."""
    nodes = (
        Node("x", "input", shape="float32[s0, 10]"),
        Node("size", "aten.sym_size.int", shape="s0"),
        operator("a1", "a", "worker:0", 0),
        operator("a2", "a.inner", "worker:0", 0),
        operator("b1", "block", "worker:0", 0),
        operator("b2", "block", "worker:1", 1),
        operator("b3", "block", "worker:1", 1),
        operator("z1", "z", "worker:1", 1),
        Node("output", "output", place="worker:0"),
    )
    chain = [node.name for node in nodes if node.name != "size"]
    edges = tuple(Edge(one, two, 3 * MB) for one, two in pairwise(chain))
    return Picture(
        model=model,
        captured=(*nodes[1:-1], Node("dead", "aten.relu", "a", "float32[s0, 10]")),
        passes=(PassCount("dead code", 8, 7), PassCount("constants", 7, 7)),
        nodes=nodes,
        edges=(*edges, Edge("size", "b1", 0)),
        uses=(
            DeviceUse("worker:0", 0.018, 40 * MB, 100 * MB),
            DeviceUse("worker:1", 0.006, 20 * MB),
        ),
        transfers=(Transfer("b1", "worker:0", "worker:1", 3 * MB, True),),
        reason="m-etf: 0.02 s a step",
        tried={"single worker:0": None, "m-etf": 0.02, "random": 0.03},
        step_seconds=0.02,
        micro_batches=2,
    )


def chain(length: int, scope: str = "") -> Picture:
    """Operators one after the other; those of module m are `m.format(i)` of the i-th."""
    nodes = tuple(
        operator(f"n{i}", scope.format(i // 10), f"worker:{2 * i // length}") for i in range(length)
    )
    edges = tuple(Edge(one.name, two.name, 4) for one, two in pairwise(nodes))
    return replace(picture(), captured=nodes, nodes=nodes, edges=edges, uses=())


class Towers(nn.Module):
    """Two towers whose outputs are summed; one computes the same twice."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        self.right = nn.Sequential(nn.Linear(4, 8), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.left(x), self.right(x)
        return left + right * torch.exp(right) + torch.exp(right)


def towers() -> Picture:
    """The left tower and the sum on worker:0, the right tower on worker:1."""
    captured = capture(Towers(), (torch.zeros(6, 4),))
    optimised = optimise(captured)
    graph = optimised.capture.module.graph
    operations: list[Operation] = []
    placed: dict[str, str] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        names = tuple(each.name for each in node.all_input_nodes if each.name in placed)
        right = "right" in str(node.meta.get("nn_module_stack"))
        placed[node.name] = f"worker:{int(right and node.name != 'add')}"
        operations.append(Operation(node.name, names, 0.001, 0.002, 100, 10, 192))
    for name in placed:
        if name.startswith(("add", "mul", "exp")):
            placed[name] = "worker:0"
    operations.append(Operation("loss", (operations[-1].name,), 0.001, 0.001))
    placed["loss"] = "worker:0"
    costs = CostGraph(tuple(operations))
    hardware = Hardware((Device("worker:0"), Device("worker:1", memory_bytes=MB)), Link(1e-6, 1e9))
    placement = Placement(placed, "by hand", "by hand", predict(costs, hardware, placed), {})
    tasks = {name: hardware.number(at) for name, at in placed.items()}
    parts = cut(optimised.capture.module, tasks)
    return picture_of(
        optimised, placement, costs, hardware, captured=captured, cut=parts, model="Towers"
    )
