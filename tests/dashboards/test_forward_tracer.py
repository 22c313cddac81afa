from __future__ import annotations

from pathlib import Path

import pytest
import torch
from images.networks import CifarNetwork
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from trireme.dashboards.events import add_graph, device_name
from trireme.dashboards.forward_tracer import ForwardTracer, Node, graph_of


class Twice(nn.Module):
    """Calls a child twice, and does something of its own in between."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        return self.block(self.block(x) * scale)


def nodes(watch: ForwardTracer) -> dict[str, Node]:
    return {node.name: node for node in watch.graph}


def test_operations_by_module_with_what_they_take_and_make() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    with ForwardTracer(model, task="worker:1") as watch:
        model(torch.rand(5, 3))
    found = nodes(watch)
    assert list(found) == ["input", "0/weight", "0/t", "0/bias", "0/addmm", "1/relu", "result"]
    product = found["0/addmm"]
    assert product.kind == "aten.addmm.default"
    assert product.sources == ("0/bias", "input", "0/t")
    assert product.place == "worker:1/cpu"
    (output,) = product.outputs
    assert (output.shape, output.dtype) == ((5, 2), "torch.float32")
    assert found["0/weight"].kind == "Parameter"
    assert found["result"].sources == ("1/relu",)


def test_modules_that_are_called_again_have_a_scope_again() -> None:
    model = Twice()
    with ForwardTracer(model) as watch:
        model(torch.rand(2, 4), scale=torch.ones(()))
    found = nodes(watch)
    assert {"input", "input_1", "block/0/addmm", "mul", "block_1/0/addmm", "block_1/1/relu"} <= set(
        found
    )
    assert found["mul"].sources == ("block/1/relu", "input_1")
    # The parameter is one node, which both take.
    assert sum(node.kind == "Parameter" for node in found.values()) == 2
    assert "block/0/bias" in found["block_1/0/addmm"].sources


def test_the_graph_has_the_device_of_the_innermost_placed_module(tmp_path: Path) -> None:
    model = Twice()
    with ForwardTracer(model) as watch:
        model(torch.rand(2, 4), scale=torch.ones(()))
    with SummaryWriter(str(tmp_path)) as writer:
        add_graph(writer, watch.graph, {"block": "worker:1", "block.1": "worker:0/cuda:1"})
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    devices = {node.name: node.device for node in events.Graph().node}
    first, second = "/job:worker/task:1/device:CPU:0", "/job:worker/task:0/device:GPU:1"
    assert {name: device for name, device in devices.items() if "addmm" in name} == {
        "block/0/addmm": first,
        "block_1/0/addmm": first,
    }
    assert {devices[name] for name in ("block/1/relu", "block_1/1/relu")} == {second}
    assert devices["block/0/weight"] == first
    assert devices["mul"] == device_name(watch.graph[0].place)  # in no placed module


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("worker:1", "/job:worker/task:1/device:CPU:0"),
        ("worker:0/cpu", "/job:worker/task:0/device:CPU:0"),
        ("worker:2/cuda:3", "/job:worker/task:2/device:GPU:3"),
        ("ps:0", "/job:ps/task:0/device:CPU:0"),
    ],
)
def test_places_have_tensorflow_s_names(place: str, name: str) -> None:
    assert device_name(place) == name


def test_what_is_computed_in_place_has_the_last_maker() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(inplace=True), nn.Linear(2, 1))
    with ForwardTracer(model) as watch:
        model(torch.rand(5, 3))
    assert "1/relu_" in nodes(watch)["2/addmm"].sources


def test_the_numbers_are_the_same_and_gradients_too() -> None:
    torch.manual_seed(0)
    model, images = CifarNetwork(), torch.rand(2, 3, 24, 24)
    plain = model(images)
    plain.sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with ForwardTracer(model, lambda name, module, outputs: None) as watch:
        seen = model(images)
    seen.sum().backward()
    assert torch.equal(plain, seen)
    for before, parameter in zip(gradients, model.parameters(), strict=True):
        assert parameter.grad is not None
        assert torch.equal(before, parameter.grad)
    assert {"conv1/convolution", "norm2/pow", "output/addmm"} <= set(nodes(watch))


def test_observers_see_each_module_and_leave_no_trace() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    seen: list[tuple[str, torch.Tensor]] = []
    with ForwardTracer(model, lambda n, m, out: seen.append((n, out.clone() * 2))) as watch:
        outputs = model(torch.rand(5, 3))
    assert [name for name, _ in seen] == ["0", "1", ""]
    assert torch.equal(seen[-1][1], outputs * 2)
    assert not any(node.kind.startswith(("aten.clone", "aten.mul")) for node in watch.graph)


def test_only_the_first_pass_is_watched_and_nothing_stays() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    with ForwardTracer(model) as watch:
        model(torch.rand(5, 3))
        count = len(watch.graph)
        model(torch.rand(5, 3))
    model(torch.rand(5, 3))
    assert len(watch.graph) == count
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


def test_after_an_exception_nobody_watches_any_longer() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    watch = ForwardTracer(model)
    with watch, pytest.raises(RuntimeError, match="shapes"):
        model(torch.rand(5, 4))
    count = len(watch.graph)
    torch.rand(3) * 2
    assert len(watch.graph) == count


def test_a_graph_of_its_own_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout())
    model[1].eval()
    before = model[1].running_mean.clone()
    graph = graph_of(model, (torch.rand(5, 3),))
    assert [module.training for module in model] == [True, False, True]
    assert torch.equal(model[1].running_mean, before)
    assert {node.kind for node in graph} >= {"Parameter", "Buffer", "Input", "Output"}
