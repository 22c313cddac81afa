"""The graph of a placed model in TensorBoard has the devices, scopes and shapes of its nodes."""

from __future__ import annotations

import torch
from torch import nn

from trireme.dashboards.placed_graph import placed_graph
from trireme.graph.capture.capture import capture


class Twice(nn.Module):
    """Calls one layer twice; has a module whose name is that of an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.relu = nn.ReLU()
        self.register_buffer("scale", torch.ones(4))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.relu(self.layer(self.layer(values))) * self.scale)


def test_nodes_have_scopes_shapes_and_devices() -> None:
    module = capture(Twice(), (torch.rand(6, 4),)).module
    operators = [node.name for node in module.graph.nodes if node.op == "call_function"]
    devices = {name: f"worker:{number % 2}/cpu" for number, name in enumerate(operators)}
    nodes = {node.name: node for node in placed_graph(module, devices)}
    kinds = {name: node.kind for name, node in nodes.items()}
    assert kinds == {
        "layer/weight": "Parameter",
        "layer/bias": "Parameter",
        "scale": "Buffer",
        "input": "Input",
        "layer/linear": "aten.linear",
        "layer/linear_1": "aten.linear",
        "relu/relu": "aten.relu",
        "mul": "aten.mul.Tensor",
        "relu_1": "aten.relu",  # not `relu`, which is a scope
        "result": "Output",
    }
    assert nodes["layer/linear_1"].sources == ("layer/linear", "layer/weight", "layer/bias")
    assert [output.shape for output in nodes["mul"].outputs] == [(-1, 4)]
    assert [output.shape for output in nodes["layer/weight"].outputs] == [(4, 4)]
    assert nodes["layer/linear"].device == "/job:worker/task:0/device:CPU:0"
    assert nodes["layer/linear_1"].device == "/job:worker/task:1/device:CPU:0"
    assert nodes["input"].device == ""
