"""Operators are measured one by one: what they take together is what the model takes."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from images.networks import CifarNetwork
from language.networks import Transformer
from torch import nn
from torch.nn import functional as F

from trireme.errors import ConfigurationError
from trireme.graph.capture.capture import Capture, capture
from trireme.graph.measure.measurement import Measurement, measure
from trireme.graph.measure.trial import Trials
from trireme.graph.place.costs import Operation


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Calling(nn.Module):
    """A module whose forward is a function of the module and its inputs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(8, 8)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def captured(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Capture:
    return capture(Calling(function), args, kwargs, verify=False)


def seconds_of(measured: Measurement) -> float:
    every = [*measured.costs.values(), measured.loss]
    return sum(each.forward_seconds + each.backward_seconds for each in every)


def costs_of(function: Callable[..., Any], *args: torch.Tensor) -> dict[str, Operation]:
    return dict(measure(captured(function, *args), args, repeats=2).costs)


TOKENS = torch.zeros(16, 32, dtype=torch.int64)
MODELS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "CIFAR": (CifarNetwork, torch.randn(16, 3, 24, 24)),
    "transformer": (lambda: Transformer(500, 128, 4, 2, 32, 0.1), TOKENS),
}


@pytest.mark.slow  # it needs a machine that is not busy
@pytest.mark.parametrize("name", MODELS)
def test_the_sum_of_the_operators_is_the_model(name: str) -> None:
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    graph = capture(make(), (inputs,), verify=False)

    def loss(outputs: torch.Tensor) -> torch.Tensor:
        logits = outputs.flatten(0, -2)
        return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64))

    ratios = []
    with one_thread():
        for _ in range(8):  # others of this machine take its caches
            measured = seconds_of(measure(graph, (inputs,), loss=loss, repeats=15))
            steps = []
            for _ in range(8):
                graph.module.zero_grad(set_to_none=True)
                began = time.thread_time()
                loss(graph.module(inputs)).backward()
                steps.append(time.thread_time() - began)
            ratios.append(measured / statistics.median(steps[2:]))
            if 0.8 <= ratios[-1] <= 1.2:
                return
    pytest.fail(f"measured operators take {ratios} of a step")


def test_equal_operators_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    run = Trials.run

    def counted(self: Trials, *args: Any, **kwargs: Any) -> Any:
        runs.append(1)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(Trials, "run", counted)

    def twice(module: Any, values: torch.Tensor) -> torch.Tensor:
        values = module.linear(values).relu()  # the first reads data, the others trained values
        for _ in range(6):
            values = module.linear(values).relu()
        return values

    assert len(costs_of(twice, torch.randn(4, 8))) == 14
    assert len(runs) == 3


def test_what_autograd_keeps_counts_once_where_it_is_made() -> None:
    def function(module: Any, data: torch.Tensor) -> torch.Tensor:
        hidden = module.linear(data)  # keeps data, an input, and the weight
        big = hidden.exp()  # keeps its own value
        seen = big.view(-1, 4, 2)  # nothing of its own
        return seen * seen + big.sin().view(-1, 4, 2)  # seen twice and big once: all is exp's value

    costs = costs_of(function, torch.randn(16, 8))
    size = 16 * 8 * 4
    kept = {name: cost.activation_bytes for name, cost in costs.items()}
    assert {name: each for name, each in kept.items() if each} == {"exp": size}
    assert costs["linear"].output_bytes == size
    assert all(cost.differentiable for cost in costs.values())


def test_masks_and_saved_values_of_in_place_operators_count() -> None:
    def function(module: Any, data: torch.Tensor) -> torch.Tensor:
        return F.dropout(module.linear(data).relu_(), 0.5, training=True)

    costs = costs_of(function, torch.randn(16, 8))
    size = 16 * 8 * 4
    assert costs["linear"].activation_bytes == size  # relu_ keeps its result: linear's memory
    assert costs["relu_"].activation_bytes == 0
    assert costs["relu_"].backward_seconds > 0
    assert size // 4 <= costs["dropout"].activation_bytes <= size  # its mask


def test_several_outputs_have_costs_of_their_own() -> None:
    def function(module: Any, data: torch.Tensor) -> torch.Tensor:
        low, high = module.linear(data).chunk(2, dim=1)
        values, places = high.max(dim=1)
        return low.sin() + values.exp()[:, None] + places[:, None]

    costs = costs_of(function, torch.randn(16, 8))
    size = 16 * 8 * 4
    # sin keeps a view of linear's value; max keeps the places; exp its own value.
    assert costs["linear"].activation_bytes == size
    assert costs["chunk"].activation_bytes == 0
    assert costs["max_1"].activation_bytes == 16 * 8
    assert costs["exp"].activation_bytes == 16 * 4
    places = [cost for name, cost in costs.items() if name.startswith("getitem")]
    assert [cost.differentiable for cost in places] == [True, True, True, False]


def test_data_and_frozen_parameters_have_no_backward_computation() -> None:
    model = Calling(lambda module, data: module.linear(data.exp()))
    model.linear.requires_grad_(False)
    graph = capture(model, (torch.randn(4, 8),), verify=False)
    for cost in measure(graph, (torch.randn(4, 8),), repeats=2).costs.values():
        assert cost.backward_seconds == 0
        assert cost.activation_bytes == 0
        assert not cost.differentiable


def test_regions_without_gradients_are_measured_as_a_whole() -> None:
    def function(module: Any, data: torch.Tensor) -> torch.Tensor:
        hidden = module.linear(data)
        with torch.no_grad():
            scale = hidden.exp().sum()
        return hidden * scale

    costs = costs_of(function, torch.randn(64, 8))
    region = costs["sum_1"]
    assert region.forward_seconds > 0
    assert region.backward_seconds == 0
    assert not region.differentiable


def test_sizes_are_those_of_the_example() -> None:
    def function(module: Any, data: torch.Tensor) -> torch.Tensor:
        return module.linear(data).view(data.shape[0] * 2, -1).expand(3, -1, -1)

    graph = captured(function, torch.randn(4, 8))
    for batch in (4, 6):
        costs = measure(graph, (torch.randn(batch, 8),), repeats=1).costs
        assert costs["linear"].output_bytes == batch * 8 * 4
        assert costs["expand"].output_bytes == 3 * batch * 8 * 4


def test_a_model_without_memory_is_measured_and_nothing_is_changed() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout())
    graph = capture(model, (torch.randn(4, 8, device="meta"),), verify=False)
    state = torch.get_rng_state()
    costs = measure(graph, (torch.randn(4, 8, device="meta"),), loss=torch.sum).costs
    assert torch.equal(torch.get_rng_state(), state)
    assert costs["linear"].forward_seconds > 0
    assert all(tensor.is_meta for tensor in model.state_dict().values())


def test_the_models_own_tensors_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    graph = capture(model, (torch.randn(4, 8),), verify=False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    measure(graph, (torch.randn(4, 8),), loss=lambda outputs: outputs.sum(), repeats=3)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_loss_counts_and_keeps() -> None:
    graph = captured(lambda module, data: {"made": module.linear(data)}, torch.randn(64, 8))
    found = measure(graph, (torch.randn(64, 8),), loss=lambda outputs: outputs["made"].exp().sum())
    assert found.loss.forward_seconds > 0
    assert found.loss.backward_seconds > 0
    assert found.loss.activation_bytes == 64 * 8 * 4
    assert seconds_of(found) > sum(cost.forward_seconds for cost in found.costs.values())


def test_the_time_is_bounded() -> None:
    calls = []

    def slow(values: Any) -> torch.Tensor:
        calls.append(1)
        return values[0] + 1

    Trials(1000).run(slow, [torch.zeros(4, device="meta")], seconds=0.0)
    assert len(calls) == 1  # at least once
    Trials(5).run(slow, [torch.zeros(4, device="meta")], seconds=60.0)
    assert len(calls) == 1 + 1 + 5  # and one more, which does not count


def test_operators_that_refuse_random_inputs_take_no_time(caplog: pytest.LogCaptureFixture) -> None:
    def function(module: Any, data: torch.Tensor) -> torch.Tensor:
        return torch.linalg.cholesky(data) + module.linear(data)

    graph = captured(function, torch.eye(8) * 2)
    with caplog.at_level(logging.WARNING):
        costs = measure(graph, (torch.eye(8),)).costs
    assert costs["linalg_cholesky"] == Operation(
        "linalg_cholesky", output_bytes=8 * 8 * 4, differentiable=False
    )
    assert "does not take random inputs" in caplog.text


def test_inputs_by_name_and_wrong_ones() -> None:
    graph = captured(
        lambda module, data, *, scale: module.linear(data) * scale,
        torch.randn(4, 8),
        scale=torch.randn(4, 8),
    )
    costs = measure(graph, (torch.randn(4, 8),), {"scale": torch.randn(4, 8)}, repeats=1).costs
    assert costs["linear"].output_bytes == 4 * 8 * 4
    with pytest.raises(ConfigurationError, match="nested otherwise than those of the capture"):
        measure(graph, (torch.randn(4, 8),))
