"""Cost graphs of captured models: the operations, their bytes, and what shares a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from language.networks import Transformer
from torch import nn

from trireme.graph.capture.capture import Capture, capture
from trireme.graph.execute.cut import cut
from trireme.graph.measure.cost_graph import OUTPUT, cost_graph, grouping
from trireme.graph.measure.measurement import Measurement, measure
from trireme.graph.measure.updates import state_factor, update_seconds
from trireme.graph.place.costs import Constraints, Device, Hardware, Link
from trireme.graph.place.placement import place
from trireme.graph.place.problem import problem_of


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 8)
        self.second.bias.requires_grad_(False)
        self.register_buffer("scale", torch.ones(8))
        self.unused = nn.Linear(2, 2)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        values = self.norm(self.first(data)) * self.scale
        low, high = self.second(values.relu_()).chunk(2, dim=1)
        return low + high * torch.tensor([1.0, 2.0, 3.0, 4.0])


def network() -> tuple[Capture, Measurement]:
    inputs = torch.randn(4, 8)
    graph = capture(Network(), (inputs,), verify=False)
    return graph, measure(graph, (inputs,), loss=lambda outputs: outputs.sum(), repeats=2)


def test_operations_are_operators_parameters_buffers_and_the_loss() -> None:
    graph, measured = network()
    costs = cost_graph(graph, measured, state_factor=2.0, update_seconds=1e-5)
    operations = {each.name: each for each in costs.operations}
    held = {each.target: each.name for each in graph.module.graph.find_nodes(op="get_attr")}
    weight = operations[held["first.weight"]]
    assert weight.resident_bytes == 8 * 8 * 4 * (2 + 2)
    assert weight.stored
    assert weight.output_bytes == 8 * 8 * 4
    assert weight.forward_seconds == 0
    assert weight.backward_seconds == pytest.approx(8 * 8 * 4 * 1e-5)
    assert weight.differentiable
    for name in ("second.bias", "scale", "norm.running_mean"):
        buffer = operations[held[name]]
        assert buffer.resident_bytes == 8 * 4
        assert buffer.backward_seconds == 0
        assert not buffer.differentiable
    assert not any(target.startswith("unused") and name in operations
                   for target, name in held.items())  # fmt: skip
    assert operations["linear"].inputs == (held["first.weight"], held["first.bias"])  # no data
    assert costs.operations[-1].name == OUTPUT
    assert operations[OUTPUT].inputs == ("add",) or "add" in operations[OUTPUT].inputs[0]
    assert operations[OUTPUT].backward_seconds == measured.loss.backward_seconds
    assert operations["linear"].forward_seconds == measured.costs["linear"].forward_seconds
    assert costs.segment_seconds == measured.segment_seconds > 0


def test_the_same_arguments_make_the_same_graph() -> None:
    graph, measured = network()
    one, other = (cost_graph(graph, measured, state_factor=1) for _ in range(2))
    assert one == other


def test_values_memory_and_parameters_are_together_with_their_operators() -> None:
    graph, measured = network()
    costs = cost_graph(graph, measured, state_factor=0)
    groups = [set(group) for group in grouping(graph).together]
    assert {"chunk", "getitem"} in groups
    assert {"chunk", "getitem_1"} in groups
    assert any({"mul", "relu_"} <= group for group in groups)
    assert any({"first_weight", "linear"} == group for group in groups)
    assert any({"norm_running_mean", "batch_norm"} <= group for group in groups)
    apart = [set(group) for group in grouping(graph, ["first_weight"]).together]
    assert not any("first_weight" in group for group in apart)
    # They name operations only, and leave a choice.
    hardware = Hardware((Device("a"), Device("b")))
    problem = problem_of(costs, hardware, grouping(graph), 1)
    assert 1 < len(problem.allowed) < len(costs.operations)
    pinned = Constraints(
        {"first_weight": "a", "linear": "b"}, grouping(graph, ["first_weight"]).together
    )
    problem_of(costs, hardware, pinned, 1)


MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "transformer": (lambda: Transformer(50, 16, 2, 2, 6), torch.zeros(4, 6, dtype=torch.int64)),
    "network": (Network, torch.randn(4, 8)),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_prediction_has_the_transfers_of_the_cut(name: str) -> None:
    make, inputs = MODELS[name]
    graph = capture(make(), (inputs,), verify=False)
    measured = measure(graph, (inputs,), loss=lambda outputs: outputs.sum(), repeats=1)
    costs = cost_graph(graph, measured, state_factor=0)
    hardware = Hardware((Device("a"), Device("b"), Device("c")), Link(1e-9, 1e12))
    for algorithm in ("round-robin", "cuts"):
        found = place(costs, hardware, grouping(graph), algorithm=algorithm)  # type: ignore[arg-type]
        tasks = {name: hardware.numbers[device] for name, device in found.devices.items()}
        parts = cut(graph.module, tasks, output_place=tasks[OUTPUT])
        sent = sorted(
            (value.place, reader) for value in parts.values.values() for reader in value.readers
        )
        back = sorted(
            (reader, value.place)
            for value in parts.values.values()
            for reader in value.readers
            if value.differentiable
        )
        simulator = problem_of(costs, hardware, Constraints(), 1).simulator
        _, _, senders, receivers, _, returns, _ = simulator.parts(
            np.array([tasks[name] for name in costs.positions])
        ).transfers
        assert sorted(zip(senders, receivers, strict=True)) == sent
        assert sorted(zip(receivers[returns], senders[returns], strict=True)) == back


@pytest.mark.parametrize(
    ("make", "factor"),
    [
        (lambda parameters: torch.optim.SGD(parameters, 0.1), 0),
        (lambda parameters: torch.optim.SGD([{"params": parameters, "momentum": 0.9}]), 1),
        (lambda parameters: torch.optim.Adam(parameters), 2),
        (lambda parameters: torch.optim.AdamW(parameters, amsgrad=True), 3),
    ],
)
def test_the_state_of_optimizers(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], factor: float
) -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = make([parameter])
    assert state_factor(optimizer) == factor
    assert not optimizer.state
    assert torch.equal(parameter, torch.ones(3))
    assert 0 < update_seconds(optimizer, repeats=3) < 1e-6


def test_a_model_too_large_for_one_device_is_placed_on_two() -> None:
    inputs = torch.zeros(4, 6, dtype=torch.int64)
    graph = capture(Transformer(50, 32, 2, 2, 6), (inputs,), verify=False)
    measured = measure(graph, (inputs,), loss=lambda outputs: outputs.sum(), repeats=1)
    costs = cost_graph(graph, measured, state_factor=2)
    total = sum(each.resident_bytes for each in costs.operations)
    limit = int(0.7 * total)
    hardware = Hardware((Device("a", memory_bytes=limit), Device("b", memory_bytes=limit)))
    found = place(costs, hardware, grouping(graph), evaluations=200)
    assert len(set(found.devices.values())) == 2
    assert all(device.peak_bytes <= limit for device in found.prediction.devices)
