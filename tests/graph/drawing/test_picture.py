from __future__ import annotations

import torch
from torch import nn

from tests.graph.drawing.samples import MB, towers
from trireme.graph.capture.capture import capture
from trireme.graph.capture.optimise import optimise
from trireme.graph.drawing.assembly import picture_of
from trireme.graph.drawing.picture import PARAMETER, Transfer
from trireme.graph.execute.cut import cut
from trireme.graph.place.costs import CostGraph, Device, Hardware, Operation
from trireme.graph.place.placement import Placement
from trireme.graph.place.prediction import predict


class Stem(nn.Module):
    """A value that two branches read, and their sum."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stem = torch.sin(x)
        return torch.cos(stem) + torch.tanh(stem)


def test_a_graph_alone_has_operators_scopes_shapes_lines_and_edges() -> None:
    captured = capture(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), (torch.zeros(6, 4),))
    drawn = picture_of(None, optimise(captured), None, None, None)
    first, linear, relu, output = drawn.nodes
    assert (first.operator, output.operator) == ("input", "output")
    assert (linear.operator, linear.scope, relu.scope) == ("aten.linear", "0", "1")
    assert linear.shape.startswith("float32[s")
    assert linear.shape.endswith(", 8]")
    assert ":" in linear.source
    # The batch is a symbol: the size of the value is that of the example's batch.
    assert [(edge.source, edge.target, edge.bytes) for edge in drawn.edges] == [
        (first.name, linear.name, 6 * 4 * 4),
        (linear.name, relu.name, 6 * 8 * 4),
        (relu.name, output.name, 6 * 8 * 4),
    ]
    assert not any(edge.crosses for edge in drawn.edges)
    assert not (drawn.placed or drawn.cut or drawn.costed)
    assert drawn.step_seconds is None
    assert drawn.place_names == ()


def test_a_placed_and_cut_graph_has_places_costs_depths_and_transfers() -> None:
    drawn = towers()
    nodes = {node.name: node for node in drawn.nodes}
    linear, linear_1 = nodes["linear"], nodes["linear_1"]
    assert (linear.place, linear_1.place) == ("worker:0", "worker:1")
    assert (linear.forward_seconds, linear.resident_bytes) == (0.001, 100)
    assert (linear.depth, linear_1.depth, nodes["add"].depth) == (0, 0, 1)
    assert nodes["loss"].operator == "loss"
    # Both readers of the right tower's value are on worker:0: it is sent once.
    assert drawn.transfers == (Transfer("tanh", "worker:1", "worker:0", 192, True),)
    crossing = {(edge.source, edge.target) for edge in drawn.edges if edge.crosses}
    assert {source for source, _ in crossing} == {"tanh"}
    assert [place.limit_bytes for place in drawn.places] == [None, MB]
    assert drawn.step_seconds is not None
    assert drawn.model == "Towers"


def test_nodes_are_late_where_their_place_has_an_early_segment_too() -> None:
    late = {node.name for node in towers().nodes if node.late}
    assert late == set()  # a place has one segment of each depth
    optimised = optimise(capture(Stem(), (torch.zeros(2, 4),), verify=False))
    places = {"sin": 0, "cos": 0, "tanh": 1, "add": 0}
    parts = cut(optimised.capture.module, places)
    drawn = picture_of(None, optimised, None, parts, None)
    assert {node.name for node in drawn.nodes if node.late} == {"cos"}


def test_without_a_cut_the_places_say_what_is_transferred() -> None:
    drawn = towers(cuts=False)
    assert [(each.value, each.receiver) for each in drawn.transfers] == [("tanh", "worker:0")]
    assert not drawn.cut
    assert all(node.depth is None for node in drawn.nodes)


def test_what_the_optimisation_removed() -> None:
    drawn = towers()
    assert len(drawn.captured) == drawn.passes[0].before
    assert [node.operator for node in drawn.removed] == ["aten.exp"]


def test_a_parameter_that_is_placed_by_itself_is_before_its_first_reader() -> None:
    captured = capture(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (torch.zeros(6, 4),))
    operations = [
        Operation("_1_weight", resident_bytes=64),
        Operation("linear", (), 1.0, 1.0),
        Operation("linear_1", ("linear", "_1_weight"), 1.0, 1.0),
    ]
    names = {node.name for node in captured.module.graph.nodes}
    weight = next(name for name in names if name.endswith("1_weight"))
    operations[0] = Operation(weight, resident_bytes=64)
    operations[2] = Operation("linear_1", ("linear", weight), 1.0, 1.0)
    costs = CostGraph(tuple(operations))
    devices = {weight: "ps:0", "linear": "worker:0", "linear_1": "worker:0"}
    hardware = Hardware((Device("worker:0"), Device("ps:0")))
    placement = Placement(devices, "expert", "by hand", predict(costs, hardware, devices), {})
    drawn = picture_of(None, optimise(captured), placement, None, costs)
    order = [node.name for node in drawn.nodes]
    assert order[1:4] == ["linear", weight, "linear_1"]
    parameter = drawn.nodes[2]
    assert (parameter.operator, parameter.scope, parameter.place) == (PARAMETER, "1", "ps:0")
    assert [(each.value, each.receiver) for each in drawn.transfers] == [(weight, "worker:0")]
