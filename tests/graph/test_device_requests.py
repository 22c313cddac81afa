"""Requests that a job cannot meet: what becomes of them, and how they are said."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trireme.errors import ConfigurationError
from trireme.graph.capture.capture import capture
from trireme.graph.place.requests import matched, resolve

PLACES = ("worker:0/cpu", "worker:1/cpu")
OPERATIONS = ("weight", "linear")


def test_a_task_without_a_device_means_its_only_one() -> None:
    found = resolve({"linear": "worker:1"}, (), OPERATIONS, PLACES)
    assert found.constraints.pinned == {"linear": "worker:1/cpu"}
    assert not found.unmet


def test_servers_hold_parameters_and_compute_nothing() -> None:
    requested = {"weight": "ps:0", "linear": "ps:0"}
    found = resolve(requested, (), OPERATIONS, PLACES, parameters={"weight"}, servers=1)
    assert not found.constraints.pinned
    assert found.unmet == ("linear cannot be on ps:0: parameter servers hold parameters only",)


def test_without_servers_parameters_may_be_anywhere_unless_the_devices_must_be_there() -> None:
    def resolved(soft: bool) -> tuple[str, ...]:
        found = resolve(
            {"weight": "ps:0"}, (), OPERATIONS, PLACES, parameters={"weight"}, soft=soft
        )
        return found.unmet

    assert resolved(soft=True) == ()
    with pytest.raises(ConfigurationError, match="weight cannot be on ps:0: this job has"):
        resolved(soft=False)


def test_what_cannot_be_met_has_the_names_of_the_model_and_what_to_do() -> None:
    requested = {"weight": "worker:7", "linear": "worker:7"}
    names = {"weight": "head.weight"}
    found = resolve(requested, (), OPERATIONS, PLACES, names=names)
    sentence = "head.weight, linear cannot be on worker:7: this job has worker:0/cpu, worker:1/cpu"
    assert found.unmet == (sentence,)
    with pytest.raises(ConfigurationError) as refused:
        resolve(requested, (), OPERATIONS, PLACES, names=names, soft=False)
    assert str(refused.value).startswith(sentence)
    assert "GraphConfig(soft=True)" in str(refused.value)


def test_a_device_filter_leaves_the_others_out() -> None:
    found = resolve({"linear": "worker:1"}, (), OPERATIONS, PLACES, devices=("worker:0",))
    assert found.constraints.pinned == dict.fromkeys(OPERATIONS, "worker:0/cpu")
    assert found.unmet == (
        "linear cannot be on worker:1: the devices that the configuration allows are others",
    )
    with pytest.raises(ConfigurationError, match="names worker:5, and this job has worker:0/cpu"):
        resolve({}, (), OPERATIONS, PLACES, devices=("worker:5",))


def test_patterns_name_modules_parameters_and_operators() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    graph = capture(model, (torch.rand(2, 4),)).module.graph
    found = matched(graph, {"0.bias": "worker:1", "0": "worker:0", "rel*": "worker:1"})
    devices = {str(node.target): found.get(node.name) for node in graph.nodes}
    assert devices["0.weight"] == "worker:0"
    assert devices["0.bias"] == "worker:1"
    assert found["relu"] == "worker:1"
    with pytest.raises(ConfigurationError, match="has no module, parameter or operator of that"):
        matched(graph, {"encoder": "worker:0"})
    with pytest.raises(ConfigurationError, match="write worker:1"):
        matched(graph, {"0": "gpu:0"})
