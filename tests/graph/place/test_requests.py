"""What a program requests of devices becomes constraints, or is refused with what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trireme.errors import ConfigurationError
from trireme.graph.capture.capture import capture
from trireme.graph.capture.scopes import check_device
from trireme.graph.place.costs import merged
from trireme.graph.place.requests import matched, resolve

PLACES = ("worker:0/cpu", "worker:1/cpu", "worker:2/cuda:0", "worker:2/cuda:1")
NAMES = ("a", "b", "c", "d", "e")


class Pair(nn.Module):
    """Two named blocks, and an operator that belongs to neither."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.decoder = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.decoder(self.encoder(x)) + x
        return hidden


@pytest.fixture(scope="module")
def graph() -> Any:
    return capture(Pair(), [torch.ones(3, 4)]).module.graph


def targets(graph: Any, found: dict[str, str]) -> set[str]:
    """The operators and the parameters of which a device is requested."""
    return {str(node.target) for node in graph.nodes if node.name in found}


# Names of devices ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["worker:0", "worker:12/cpu", "worker:1/cuda:3", "ps:0", "ps:10"])
def test_names_of_devices(name: str) -> None:
    assert check_device(name) == name


@pytest.mark.parametrize(
    "name",
    [
        *("", "worker", "worker:", "worker:x", "worker:0/gpu:1", "worker:0/cuda", "cpu"),
        *("worker:0 ", "Worker:0", "worker:-1", "worker:0/cpu/x", "worker:\u0663", "worker:0\n"),
        *("ps:0/cpu", "ps:", "ps:a"),
    ],
)
def test_other_names_are_refused_with_the_right_ones(name: str) -> None:
    with pytest.raises(ConfigurationError, match="write worker:1, worker:1/cuda:0 or worker:1/cpu"):
        check_device(name)


# Patterns ----------------------------------------------------------------------------------------


def test_a_module_s_name_is_that_of_its_operators_and_parameters(graph: Any) -> None:
    found = matched(graph, {"encoder": "worker:1"})
    wanted = {"encoder.0.weight", "encoder.0.bias", "aten.linear.default", "aten.relu.default"}
    assert targets(graph, found) == wanted
    assert len(found) == 4 and set(found.values()) == {"worker:1"}


def test_a_parameter_has_a_name(graph: Any) -> None:
    found = matched(graph, {"decoder.bias": "ps:0"})
    assert targets(graph, found) == {"decoder.bias"}


def test_an_operator_has_a_name(graph: Any) -> None:
    assert matched(graph, {"add*": "worker:1"}) == {"add": "worker:1"}


def test_the_first_pattern_that_matches_decides(graph: Any) -> None:
    first = matched(graph, {"encoder.0": "worker:1", "*": "worker:0"})
    assert first.keys() == matched(graph, {"*": "worker:0"}).keys()
    ones = {name for name, device in first.items() if device == "worker:1"}
    assert targets(graph, dict.fromkeys(ones, "")) == {
        "encoder.0.weight",
        "encoder.0.bias",
        "aten.linear.default",
    }


def test_a_pattern_that_names_nothing_is_refused_with_what_it_may_mean(graph: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"'decodr'.*did you mean decoder\?"):
        matched(graph, {"decodr": "worker:0"})


def test_a_pattern_that_is_always_overruled_is_one_that_names_something(graph: Any) -> None:
    assert "worker:1" not in matched(graph, {"*": "worker:0", "encoder": "worker:1"}).values()


def test_a_misspelt_device_is_refused(graph: Any) -> None:
    with pytest.raises(ConfigurationError, match="'gpu:0' is no device"):
        matched(graph, {"encoder": "gpu:0"})


def test_no_pattern_requests_nothing(graph: Any) -> None:
    assert matched(graph, {}) == {}


# Constraints ------------------------------------------------------------------------------------


def resolved(requested: dict[str, str], together: Any = (), **options: Any) -> Any:
    return resolve(requested, together, NAMES, PLACES, **options)


def test_a_device_is_one_place() -> None:
    found = resolved({"a": "worker:1/cpu", "b": "worker:1", "c": "worker:2/cuda:1"})
    assert found.constraints.pinned == {
        "a": "worker:1/cpu",
        "b": "worker:1/cpu",
        "c": "worker:2/cuda:1",
    }
    assert not found.constraints.never and not found.unmet


def test_a_task_of_several_devices_leaves_the_choice() -> None:
    found = resolved({"a": "worker:2"})
    assert not found.constraints.pinned
    assert found.constraints.never == {"a": ("worker:0/cpu", "worker:1/cpu")}


def test_worker_1_is_not_worker_12() -> None:
    places = ("worker:1/cpu", "worker:12/cpu")
    found = resolve({"a": "worker:1"}, (), ["a"], places)
    assert found.constraints.pinned == {"a": "worker:1/cpu"}


def test_a_device_that_is_not_there_is_reported_and_the_operation_placed_freely() -> None:
    found = resolved({"a": "worker:3", "b": "worker:0"})
    assert found.constraints.pinned == {"b": "worker:0/cpu"}
    assert found.constraints.never == {}
    (sentence,) = found.unmet
    assert sentence.startswith("a cannot be on worker:3: this job has worker:0/cpu, worker:1/cpu")


def test_many_operations_of_one_device_are_one_sentence() -> None:
    (sentence,) = resolved(dict.fromkeys(NAMES, "worker:9")).unmet
    assert sentence.startswith("a, b, c and 2 more cannot be on worker:9")


def test_hard_requests_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="a cannot be on worker:3"):
        resolved({"a": "worker:3"}, soft=False)
    assert resolved({"a": "worker:1"}, soft=False).constraints.pinned == {"a": "worker:1/cpu"}


# Parameter servers ----------------------------------------------------------------------------


def test_a_parameter_may_be_on_a_server_and_is_read_anywhere() -> None:
    found = resolved({"a": "ps:0", "b": "ps:1"}, parameters={"a", "b"}, servers=2)
    assert not found.constraints.pinned and not found.constraints.never and not found.unmet


@pytest.mark.parametrize(
    ("servers", "parameters", "why"),
    [(2, {"a"}, "and 2 servers"), (3, set(), "parameter servers hold parameters only")],
)
def test_what_no_server_can_hold_says_why(servers: int, parameters: set[str], why: str) -> None:
    options = {"servers": servers, "parameters": parameters}
    found = resolved({"a": "ps:2"}, **options)
    assert not found.constraints.pinned
    assert found.unmet[0].startswith("a cannot be on ps:2") and why in found.unmet[0]
    with pytest.raises(ConfigurationError, match="a cannot be on ps:2"):
        resolved({"a": "ps:2"}, soft=False, **options)


# Operations that must share a device --------------------------------------------------------------


def test_the_first_request_of_a_group_holds_for_all_of_it() -> None:
    found = resolved({"b": "worker:1", "d": "worker:0"}, [("d", "b"), ("b", "e")])
    assert found.constraints.pinned == dict.fromkeys("bde", "worker:1/cpu")
    assert found.constraints.together == (("d", "b"), ("b", "e"))
    (sentence,) = found.unmet
    assert sentence.startswith("d cannot be on worker:0: it must share a device with b")
    assert "with b, which is on worker:1" in sentence


def test_a_hard_request_that_its_group_overrules_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match="d cannot be on worker:0: it must share a device with b"
    ):
        resolved({"b": "worker:1", "d": "worker:0"}, [("b", "d")], soft=False)


def test_a_parameter_on_a_server_says_nothing_of_its_group() -> None:
    requested = {"a": "ps:0", "c": "worker:1"}
    found = resolved(requested, [("a", "c", "e")], parameters={"a"}, servers=1)
    assert found.constraints.pinned == {"c": "worker:1/cpu", "e": "worker:1/cpu"}
    assert not found.unmet


groups = st.lists(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=4), max_size=6)


@given(groups)
def test_merged_groups_are_the_connected_ones(given_groups: list[list[str]]) -> None:
    found = merged(given_groups)
    assert sum(map(len, found)) == len(set[str]().union(*found)), "no two have one in common"
    for group in given_groups:
        assert any(set(group) <= each for each in found)
    for each in found:  # nothing is there that no chain of groups leads to
        reached = {next(iter(each))}
        while more := [g for g in given_groups if reached & set(g) and not set(g) <= reached]:
            reached.update(*more)
        assert reached == each


devices = st.sampled_from(
    ["worker:0", "worker:1/cpu", "worker:2", "worker:2/cuda:1", "worker:5", "ps:0", "ps:3"]
)


@given(
    requested=st.dictionaries(st.sampled_from(NAMES), devices),
    together=st.lists(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3), max_size=3),
    parameters=st.frozensets(st.sampled_from(NAMES)),
)
def test_constraints_can_be_met_and_every_request_is_met_or_reported(
    requested: dict[str, str], together: list[list[str]], parameters: Any
) -> None:
    found = resolved(requested, together, parameters=parameters, servers=1)
    constraints = found.constraints

    def where(name: str) -> set[str]:
        never = set(constraints.never.get(name, ()))
        pinned = constraints.pinned.get(name)
        return (set(PLACES) if pinned is None else {pinned}) - never

    def belongs(place: str, device: str) -> bool:
        return (place + "/").startswith(device + "/")

    for name in NAMES:
        assert where(name)
    for group in merged(together):
        assert set.intersection(*(where(name) for name in group))
    reported = " ".join(found.unmet)
    for name, device in requested.items():
        met = name in parameters and device == "ps:0"
        met |= all(belongs(place, device) for place in where(name))
        assert met or device in reported


def test_without_servers_parameters_may_be_anywhere_unless_the_devices_must_be_there() -> None:
    def resolved(soft: bool) -> tuple[str, ...]:
        found = resolve(
            {"weight": "ps:0"},
            (),
            ("weight", "linear"),
            ("worker:0/cpu", "worker:1/cpu"),
            parameters={"weight"},
            soft=soft,
        )
        return found.unmet

    assert resolved(soft=True) == ()
    with pytest.raises(ConfigurationError, match="weight cannot be on ps:0: this job has"):
        resolved(soft=False)


def test_what_cannot_be_met_has_the_names_of_the_model_and_what_to_do() -> None:
    requested = {"weight": "worker:7", "linear": "worker:7"}
    names = {"weight": "head.weight"}
    found = resolve(
        requested, (), ("weight", "linear"), ("worker:0/cpu", "worker:1/cpu"), names=names
    )
    sentence = "head.weight, linear cannot be on worker:7: this job has worker:0/cpu, worker:1/cpu"
    assert found.unmet == (sentence,)
    with pytest.raises(ConfigurationError) as refused:
        resolve(
            requested,
            (),
            ("weight", "linear"),
            ("worker:0/cpu", "worker:1/cpu"),
            names=names,
            soft=False,
        )
    assert str(refused.value).startswith(sentence)
    assert "GraphConfig(soft=True)" in str(refused.value)
