"""Cutting graphs: segments, depths, values, errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from trireme.errors import ConfigurationError
from trireme.graph.capture.capture import capture
from trireme.graph.capture.effects import Memory
from trireme.graph.execute.cut import Cut, cut, fingerprint
from trireme.graph.execute.executor import Executor, Microbatch
from trireme.graph.execute.node_groups import changed
from trireme.graph.execute.transfers import TaskDevice


class Towers(nn.Module):
    """Two towers that share a layer; their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.shared = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left: torch.Tensor = self.shared(torch.relu(self.left(x)))
        right: torch.Tensor = self.shared(torch.tanh(self.right(x)))
        return left + right


class Function(nn.Module):
    """A function with a parameter `weight` and a buffer `count`."""

    def __init__(self, function: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def cut_at(model: nn.Module, places: Mapping[str, int], output_place: int = 0) -> Cut:
    return cut(capture(model, (torch.randn(3, 4),)).module, places, output_place=output_place)


TOWERS = {"linear": 0, "relu": 0, "linear_1": 0, "linear_2": 1, "tanh": 1, "linear_3": 1, "add": 0}


def test_towers_have_two_segments_of_depth_zero() -> None:
    parts = cut_at(Towers(), TOWERS)
    found = [(each.depth, each.place, each.part) for each in parts.segments]
    # What place 1 sends is early; place 0 sends nothing.
    assert found == [(0, 0, 1), (0, 1, 0), (1, 0, 1), (1, 0, 1)]
    assert parts.transfers == 1


def test_a_shared_parameter_that_another_place_reads_is_a_value_without_depth() -> None:
    parts = cut_at(Towers(), TOWERS)
    kept = {each.attribute: each for each in parts.values.values() if each.attribute}
    assert set(kept) == {"shared.weight", "shared.bias"}
    assert all(each.place == 0 and each.readers == (1,) for each in kept.values())
    assert all(each.differentiable for each in kept.values())


def test_a_parameter_lives_where_it_is_placed() -> None:
    parts = cut_at(Towers(), TOWERS | {"shared_weight": 2, "shared_bias": 2})
    kept = [each for each in parts.values.values() if each.attribute]
    assert {(each.place, each.readers) for each in kept} == {(2, (0, 1))}


def test_a_value_is_sent_once_to_each_place_that_reads_it() -> None:
    model = Function(lambda self, x: (a := x * self.weight, a + 1, a + 2, a + 3)[1:])
    parts = cut_at(model, {"mul": 0, "add": 1, "add_1": 1, "add_2": 2})
    assert parts.values["mul"].readers == (1, 2)


def test_inputs_constants_and_sizes_are_not_transferred() -> None:
    constant = torch.arange(4.0)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        first = x * self.weight
        return first.view(first.shape[0] * 4) + (x * constant).view(-1)

    parts = cut_at(Function(forward), {"mul": 0, "view": 1, "mul_1": 1, "view_1": 1, "add": 1}, 1)
    assert {each.name for each in parts.values.values() if each.readers} == {"mul"}
    assert parts.transfers == 1


def test_a_size_that_follows_from_those_of_inputs_is_computed_from_them() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        long = torch.cat([x * self.weight, x]).flatten()
        return long.view(long.shape[0] // 2, 2) * 3

    model = Function(forward)
    module = capture(model, (torch.randn(3, 4),)).module
    names = [each.name for each in module.graph.nodes if each.op == "call_function"]
    parts = cut(module, {name: place % 2 for place, name in enumerate(names)})
    x = torch.randn(5, 4)
    microbatch = Microbatch([x])
    Executor(
        parts, 0, [TaskDevice(0, torch.device("cpu")), TaskDevice(0, torch.device("cpu", 0))]
    ).run([microbatch])
    torch.testing.assert_close(microbatch.outputs, model(x))


def test_no_gradient_for_what_no_parameter_reaches_or_the_outputs_do_not_need() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        a, b = x * 2, x * self.weight
        c = b.detach() + 1
        return torch.sin(a) + torch.sin(b) + torch.sin(c)

    module = capture(Function(forward), (torch.randn(3, 4),)).module
    where = {each.name: int(each.name.startswith("sin")) for each in module.graph.nodes}
    parts = cut(module, where | {"add_1": 1, "add_2": 1})
    found = {each.name: each.differentiable for each in parts.values.values() if each.place == 0}
    assert found.pop("mul_1") is True
    assert set(found.values()) == {False}


def test_a_gradient_passes_through_memory_that_an_operation_without_a_value_changes() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        fresh = x * 2
        torch._foreach_add_([fresh], [x * self.weight])
        return torch.sin(fresh)

    module = capture(Function(forward), (torch.randn(3, 4),)).module
    parts = cut(module, dict.fromkeys((each.name for each in module.graph.nodes), 0))
    assert [each.differentiable for each in parts.values.values()] == [True]


def early_and_late(parts: Cut) -> list[set[str]]:
    """Returns the names of the operations of both segments of place 0 and depth 0."""
    both = [each for each in parts.segments if (each.place, each.depth) == (0, 0)]
    assert [each.part for each in both[:2]] == [0, 1]
    return [
        {node.name for node in each.module.graph.nodes if node.op == "call_function"}
        for each in both[:2]
    ]


def test_what_another_place_reads_and_what_that_needs_is_early() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        stem = torch.sin(x * self.weight)
        return torch.cos(stem).exp() + torch.tanh(stem)

    where = {"mul": 0, "sin": 0, "cos": 0, "exp": 0, "tanh": 1, "add": 0}
    parts = cut_at(Function(forward), where)
    assert early_and_late(parts) == [{"mul", "sin"}, {"cos", "exp"}]
    late = next(each for each in parts.segments if each.part == 1)
    assert (late.receives, late.outputs) == (("sin",), ("exp",))


def test_the_results_of_one_operator_are_in_one_segment() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        one, other = (x * self.weight).chunk(2, dim=1)
        return torch.cos(other) + torch.tanh(one)

    module = capture(Function(forward), (torch.randn(3, 4),)).module
    where = {each.name: int(each.name == "tanh") for each in module.graph.nodes}
    first, second = early_and_late(cut(module, where))
    assert second == {"cos"}
    assert {"getitem", "getitem_1"} <= first


def test_operations_on_changed_memory_are_in_one_segment_with_what_they_need() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        fresh = x * self.weight
        sent = fresh * 2
        fresh += torch.exp(x + self.weight)
        return torch.cos(fresh).sin() + torch.tanh(sent)

    module = capture(Function(forward), (torch.randn(3, 4),)).module
    where = {each.name: int(each.name == "tanh") for each in module.graph.nodes}
    first, second = early_and_late(cut(module, where))
    assert first == {"mul", "mul_1", "add", "exp", "add_"}
    assert second == {"cos", "sin"}


def test_operations_on_changed_memory_are_together() -> None:
    module = capture(nn.BatchNorm1d(4), (torch.randn(3, 4),)).module
    group = changed(module.graph, Memory(module.graph, module))[0]
    assert any("batch_norm" in node.name or "num_batches" in node.name for node in group)


def test_changed_memory_at_two_places_is_refused_by_name() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        fresh = x * self.weight
        fresh += 1
        return torch.sin(fresh)

    with pytest.raises(ConfigurationError, match=r"mul.*place 0.*place 1"):
        cut_at(Function(forward), {"mul": 0, "add_": 1, "sin": 1})


def test_changed_memory_around_a_transfer_is_refused() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        fresh = x * self.weight
        other = torch.sin(x * 2 + fresh.sum())
        fresh += torch.cos(other)
        return fresh

    module = capture(Function(forward), (torch.randn(3, 4),)).module
    where = dict.fromkeys((each.name for each in module.graph.nodes), 0)
    with pytest.raises(ConfigurationError, match="both before and after"):
        cut(module, where | {"cos": 1})


def test_a_returned_running_buffer_is_that_of_its_micro_batch() -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        self.count += x.mean(0)
        return x * self.weight, self.count

    model, batches = Function(forward), [torch.randn(3, 4) for _ in range(3)]
    parts = cut_at(model, {"mean": 1, "add_": 1, "mul": 0, "count": 1}, 0)
    expected = []
    total = torch.zeros(4)
    for batch in batches:
        total = total + batch.mean(0)
        expected.append(total)
    microbatches = [Microbatch([batch]) for batch in batches]
    cpu = torch.device("cpu")
    Executor(parts, 0, [TaskDevice(0, cpu), TaskDevice(0, torch.device("cpu", 0))]).run(
        microbatches
    )
    torch.testing.assert_close([each.outputs[1] for each in microbatches], expected)


def test_a_fingerprint_is_the_same_for_the_same_cut_only() -> None:
    first, again = (fingerprint(cut_at(Towers(), TOWERS)) for _ in range(2))
    assert first == again
    assert fingerprint(cut_at(Towers(), TOWERS | {"tanh": 0})) != first
    parts = cut_at(Towers(), TOWERS)
    swapped = tuple(replace(each, part=1 - each.part) for each in parts.segments)
    assert fingerprint(replace(parts, segments=swapped)) != first
    assert fingerprint(cut_at(Towers(), TOWERS | {"shared_weight": 1})) != first
    assert fingerprint(cut_at(Towers(), TOWERS, output_place=1)) != first
    graph = capture(Towers().double(), (torch.randn(3, 4, dtype=torch.float64),)).module
    assert fingerprint(cut(graph, TOWERS)) != first
