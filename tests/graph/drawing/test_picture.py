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
    crossing = {
        edge.source
        for edge in drawn.edges
        if nodes[edge.source].place and nodes[edge.source].place != nodes[edge.target].place
    }
    assert crossing == {"tanh"}
    sizes = {(edge.source, edge.target): edge.bytes for edge in drawn.edges}
    assert sizes["x", "linear"] == 6 * 4 * 4  # the batch is a symbol: that of the example
    assert [use.limit_bytes for use in drawn.uses] == [None, MB]
    assert drawn.step_seconds > 0
    assert linear.shape.startswith("float32[s") and linear.shape.endswith(", 8]")
    assert (linear.operator, linear.scope) == ("aten.linear", "left.0") and ":" in linear.source
    assert drawn.model == "Towers"


def placed(places: dict[str, int]) -> tuple[Placement, CostGraph, Hardware]:
    """Operations that take no time, on workers."""
    devices = {name: f"worker:{number}" for name, number in places.items()}
    costs = CostGraph(tuple(map(Operation, places)))
    hardware = Hardware(tuple(map(Device, sorted(set(devices.values())))))
    placement = Placement(devices, "by hand", "by hand", predict(costs, hardware, devices), {})
    return placement, costs, hardware


def test_nodes_are_late_where_their_place_has_an_early_segment_too() -> None:
    late = {node.name for node in towers().nodes if node.late}
    assert late == set()  # a place has one segment of each depth
    optimised = optimise(capture(Stem(), (torch.zeros(2, 4),), verify=False))
    places = {"sin": 0, "cos": 0, "tanh": 1, "add": 0}
    parts = cut(optimised.capture.module, places)
    placement, costs, hardware = placed(places)
    drawn = picture_of(optimised, placement, costs, hardware, cut=parts)
    assert {node.name for node in drawn.nodes if node.late} == {"cos"}


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
    placement = Placement(devices, "by hand", "by hand", predict(costs, hardware, devices), {})
    drawn = picture_of(optimise(captured), placement, costs, hardware)
    order = [node.name for node in drawn.nodes]
    assert order[1:4] == ["linear", weight, "linear_1"]
    parameter = drawn.nodes[2]
    assert (parameter.operator, parameter.scope, parameter.place) == (PARAMETER, "1", "ps:0")
