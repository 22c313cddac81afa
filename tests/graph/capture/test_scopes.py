"""Scopes of devices reach the nodes of a graph, and change nothing else."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.graph.equality import assert_same
from trireme.errors import ConfigurationError
from trireme.graph.capture.capture import capture
from trireme.graph.capture.optimise import optimised
from trireme.graph.capture.rebuild import copied, rebuild
from trireme.graph.capture.scopes import device, requested


class Towers(nn.Module):
    """Modules and parameters that are constructed in scopes, called in a forward of the test."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        with device("worker:0"):
            self.left = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
            with device("worker:1/cuda:2"):
                self.inner = nn.Linear(4, 4)
        with device("ps:1"):
            self.served = nn.Linear(4, 4)
            self.scale = nn.Parameter(torch.ones(4))
        with device("worker:2/cpu"), device("ps:0"):
            self.both = nn.Linear(4, 4)
        activation = nn.ReLU()
        with device("worker:3"):
            late = nn.Tanh()
            self.pair = nn.Sequential(activation)
        self.late = late
        self.free = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def devices(function: Callable[..., Any]) -> dict[str, str]:
    """The requested devices of those nodes that others use."""
    model = Towers(function)
    module = capture(model, [torch.ones(3, 4)]).module
    used = {node.name for node in module.graph.nodes if node.users}
    return {name: place for name, place in requested(module, model).items() if name in used}


def test_constructed_modules_have_the_innermost_scope() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.free(self.late(self.pair(self.inner(self.left(x)))))

    assert devices(forward) == {
        "left_0_weight": "worker:0",
        "left_0_bias": "worker:0",
        "linear": "worker:0",
        "relu": "worker:0",
        "inner_weight": "worker:1/cuda:2",
        "inner_bias": "worker:1/cuda:2",
        "linear_1": "worker:1/cuda:2",
        "relu_1": "worker:3",  # of what holds it
        "tanh": "worker:3",  # without parameters, and held outside the scope
    }


def test_servers_hold_parameters_alone() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with device("ps:3"):  # says nothing of operators
            return self.both(self.served(x) * self.scale)

    assert devices(forward) == {
        "served_weight": "ps:1",
        "served_bias": "ps:1",
        "scale": "ps:1",
        "both_weight": "ps:0",
        "both_bias": "ps:0",
        "linear_1": "worker:2/cpu",
    }


def test_calls_have_their_scope_before_that_of_the_construction() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with device("worker:5"):
            values = self.left(x).sin()
            with device("worker:6"):
                values = self.free(values) + 1
            with device("ps:0"):
                parts = values.chunk(2, dim=1)
        with device("worker:7"), torch.no_grad():
            steady = values.exp()
        return parts[0] * 2 + steady[:, :2]

    found = {name: place for name, place in devices(forward).items() if "left_" not in name}
    regions = {name: found.pop(name) for name in list(found) if name.startswith("exp")}
    assert set(regions.values()) == {"worker:7"}
    assert {name: place for name, place in found.items() if "getitem" not in name} == {
        "linear": "worker:5",
        "relu": "worker:5",
        "sin": "worker:5",
        "linear_1": "worker:6",
        "add": "worker:6",
        "chunk": "worker:5",
    }


def test_a_module_that_is_called_twice_has_the_scope_of_each_call() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with device("worker:8"):
            first = self.inner(x)
        return self.inner(first)

    found = devices(forward)
    assert (found["linear"], found["linear_1"]) == ("worker:8", "worker:1/cuda:2")


def test_scopes_survive_copies_pickles_rebuilding_and_optimising() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x.exp()
        with device("worker:5"):
            return self.left(x) + torch.arange(4) * 2

    model = Towers(forward)
    graph = capture(model, [torch.ones(3, 4)])
    expected = requested(graph.module, model)
    assert expected["add"] == "worker:5"
    assert requested(graph.module, copy.deepcopy(model)) == expected
    again = capture(copy.deepcopy(model), [torch.ones(3, 4)])
    assert requested(again.module, model) == expected
    assert requested(rebuild(graph.module, copied(graph.module.graph)), model) == expected
    module = optimised(graph).module
    kept = requested(module, model)
    names = {node.name for node in module.graph.nodes}
    assert kept == {name: place for name, place in expected.items() if name in names}
    assert kept["linear"] == "worker:5" and "exp" not in names

    layer = model.inner
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert isinstance(loaded, nn.Linear)
    captured = capture(nn.Sequential(loaded), [torch.ones(3, 4)])
    holder = nn.Sequential(loaded)
    assert set(requested(captured.module, holder).values()) == {"worker:1/cuda:2"}


def test_operators_of_different_devices_are_not_merged() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with device("worker:0"):
            first = x.sin() + 1
        with device("worker:1"):
            second = x.sin() + 1
            third = x.sin() + 1
        return (first * second * third) + 1

    model = Towers(forward)
    graph = capture(model, [torch.ones(3, 4)])
    placed = optimised(graph, requested(graph.module, model))
    sines = [node for node in placed.module.graph.nodes if node.name.startswith("sin")]
    assert len(sines) == 2
    found = requested(placed.module, model)
    assert (found["sin"], found["sin_1"]) == ("worker:0", "worker:1")


def test_scopes_change_no_state_and_no_result() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with device("worker:5"):
            return self.both(self.left(x))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    torch.manual_seed(0)
    towers = Towers(forward)
    assert list(towers.left.state_dict()) == list(model.state_dict())
    torch.testing.assert_close(dict(towers.left.state_dict()), dict(model.state_dict()))
    assert [name for name, _ in towers.left.named_modules()] == ["", "0", "1"]
    assert_same(capture(towers, [torch.ones(3, 4)]), towers, [torch.randn(3, 4)])


def test_nothing_is_left_of_a_scope() -> None:
    construct = nn.Module.__init__
    with pytest.raises(KeyError), device("worker:0"), device("worker:1"):
        raise KeyError
    assert nn.Module.__init__ is construct
    assert vars(nn.Linear(2, 2)).keys() == vars(nn.Linear(2, 2)).keys()
    assert not [name for name in vars(nn.Linear(2, 2)) if "trireme" in name]


def test_a_scope_holds_in_its_thread_alone() -> None:
    made = []
    with device("worker:0"):
        thread = threading.Thread(target=lambda: made.append(nn.Linear(4, 4)))
        thread.start()
        thread.join()
        made.append(nn.Linear(4, 4))
    model = nn.Sequential(*made)
    graph = capture(model, [torch.ones(3, 4)]).module
    assert set(requested(graph, model)) == {"_1_weight", "_1_bias", "linear_1"}


@pytest.mark.parametrize("name", ["worker", "worker:-1", "worker:1/cuda", "ps:0/cpu", "gpu:0", ""])
def test_other_names_are_refused(name: str) -> None:
    with (
        pytest.raises(ConfigurationError, match=f"'{name}' is no device: write worker:1"),
        device(name),
    ):
        pass
