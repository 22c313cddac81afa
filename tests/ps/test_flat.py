"""Flat buffers: a module's parameters and gradients are views into them, nothing is copied."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trireme import host
from trireme.errors import ConfigurationError, OutOfMemory
from trireme.ps.flat import FlatModel, PartBuffer, as_bytes
from trireme.ps.layout import Layout
from trireme.ps.messages import ParameterSpec


def small_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))


def flat(model: nn.Module, servers: int = 1, *, groups: int = 1) -> FlatModel:
    named = list(model.named_parameters())
    return FlatModel([named[group::groups] for group in range(groups)], servers=servers)


def backward(model: nn.Module) -> None:
    inputs = torch.arange(20, dtype=next(model.parameters()).dtype).reshape(4, 5) / 10
    model(inputs).square().sum().backward()


def test_a_model_that_does_not_fit_with_its_gradients_is_refused_before_memory_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = small_model()
    before = [parameter.data_ptr() for parameter in model.parameters()]
    monkeypatch.setattr(host, "host_memory", lambda: 500)
    with pytest.raises(OutOfMemory, match=r"the model, with its gradients, takes .* larger host"):
        flat(model)
    assert [parameter.data_ptr() for parameter in model.parameters()] == before


@pytest.mark.parametrize("groups", [1, 2])
def test_parameters_keep_their_values_and_identity(groups: int) -> None:
    model, untouched = small_model(), small_model()
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    flat(model, groups=groups)
    for (name, mine), theirs in zip(model.named_parameters(), untouched.parameters(), strict=True):
        assert id(mine) == before[name]
        assert torch.equal(mine, theirs)


def test_the_module_works_on_the_flat_memory() -> None:
    model = small_model()
    buffers = flat(model)
    placed = {p.parameter.name: p for p in buffers.layout.vectors[0].placed}
    weight = placed["2.weight"]
    buffers.values[0][weight.start] = 42.0
    assert model[2].weight[0, 0].item() == 42.0
    with torch.no_grad():
        model[2].weight[0, 0] = 43.0
    assert buffers.values[0][weight.start] == 43.0


def test_backward_fills_the_flat_gradients() -> None:
    model, untouched = small_model(), small_model()
    buffers = flat(model)
    backward(model)
    backward(untouched)
    buffers.collect_gradients()
    for placed in buffers.layout.vectors[0].placed:
        expected = untouched.get_parameter(placed.parameter.name).grad
        assert expected is not None
        assert torch.equal(buffers.gradients[0][placed.start : placed.stop], expected.reshape(-1))


def test_gradients_that_were_set_to_none_come_back_as_views() -> None:
    model, untouched = small_model(), small_model()
    buffers = flat(model)
    backward(model)
    for parameter in model.parameters():
        parameter.grad = None
    backward(model)
    backward(untouched)
    model[0].bias.grad = None  # nothing flowed here: it must not keep what was there before
    buffers.collect_gradients()
    memory = buffers.gradients[0].untyped_storage().data_ptr()
    assert model[0].bias.grad is None and buffers.absent == (1,)
    buffers.restore_gradients()
    assert buffers.absent == ()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.untyped_storage().data_ptr() == memory
        expected = untouched.get_parameter(name).grad
        assert expected is not None
        if name == "0.bias":
            expected = torch.zeros_like(expected)
        assert torch.equal(parameter.grad, expected)


@pytest.mark.parametrize("keeps_views", [True, False])
def test_what_backward_did_not_reach_is_absent(keeps_views: bool) -> None:
    model = small_model()
    buffers = flat(model)
    buffers.keeps_views = keeps_views
    for unused in ([2], [0], [], [2]):
        buffers.zero_gradients()
        assert buffers.absent == (0, 1, 2, 3)
        for layer in (0, 2):
            if layer not in unused:
                sum((p * p).sum() for p in model[layer].parameters()).backward()
        wanted = tuple(p for layer in unused for p in (layer, layer + 1))
        assert buffers.absent == wanted
        buffers.scale_gradients(0.5)
        buffers.collect_gradients()
        assert buffers.absent == wanted
        for position, (parameter, place) in enumerate(buffers._bound):
            if position in wanted:
                assert parameter.grad is None and not place.any()
            else:
                assert torch.equal(place, parameter.detach())


@pytest.mark.parametrize("keeps_views", [True, False])
def test_a_frozen_parameter_is_absent_and_one_that_was_written_to_is_not(keeps_views: bool) -> None:
    model = small_model()
    buffers = flat(model)
    buffers.keeps_views = keeps_views
    model[2].weight.requires_grad_(False)
    buffers.zero_gradients()
    backward(model)
    assert buffers.absent == (2,)
    for vector in buffers.gradients:
        vector.fill_(1.0)  # whoever writes to the vectors themselves means all of them
    if keeps_views:
        assert buffers.absent == ()
    buffers.restore_gradients()
    assert buffers.absent == ()


def test_zeroing_keeps_the_views() -> None:
    model = small_model()
    buffers = flat(model)
    backward(model)
    views = [parameter.grad for parameter in model.parameters()]
    buffers.zero_gradients()
    assert all(not gradient.any() for gradient in buffers.gradients)
    assert all(p.grad is view for p, view in zip(model.parameters(), views, strict=True))


def test_the_norm_is_that_of_all_gradients() -> None:
    model = small_model()
    model[2].double()
    buffers = flat(model)
    for gradient in buffers.gradients:
        gradient.fill_(0.0)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.fill_(2.0)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert buffers.gradient_norm().item() == pytest.approx((4 * count) ** 0.5, rel=1e-12)
    buffers.scale_gradients(0.5)
    assert all((p.grad == 1.0).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("servers", [1, 2, 5])
def test_parts_together_are_the_whole_and_share_its_memory(servers: int) -> None:
    model = small_model()
    model[0].double()
    buffers = flat(model, servers)
    for index, whole in enumerate(buffers.values):
        parts = [buffers.part_values(server).vectors[index] for server in range(servers)]
        assert torch.equal(torch.cat(parts), whole)
        parts[-1].fill_(7.0)
        assert whole[-1] == 7.0
    assert sum(buffers.part_gradients(s).nbytes for s in range(servers)) == buffers.layout.bytes


def test_a_part_is_bytes_without_a_copy() -> None:
    buffer = PartBuffer(Layout.of([ParameterSpec("a", (3,), "float32", 0)], servers=1), 0)
    assert buffer.nbytes == 64
    (view,) = buffer.views
    assert (view.nbytes, view.format, view.readonly) == (64, "B", False)
    view[:4] = torch.tensor([1.5]).numpy().tobytes()
    assert buffer.vectors[0][0] == 1.5
    assert as_bytes(torch.zeros((2, 3), dtype=torch.bfloat16)).nbytes == 12


def test_empty_parts_have_no_bytes() -> None:
    layout = Layout.of([ParameterSpec("a", (3,), "float32", 0)], servers=3, slots=3)
    sizes = [PartBuffer(layout, server).nbytes for server in range(3)]
    assert sorted(sizes) == [0, 0, 64]
    empty = PartBuffer(layout, sizes.index(0))
    assert empty.views == ()
    assert empty.segments == ()


def test_segments_are_views_of_the_vectors() -> None:
    layout = Layout.of(
        [ParameterSpec("a", (20,), "float32", 0), ParameterSpec("b", (20,), "float32", 1)],
        servers=2,
        slots=4,
    )
    buffer = PartBuffer(layout, 0)
    assert [segment.numel() for segment in buffer.segments] == [32]
    buffer.segments[0].fill_(3.0)
    assert (buffer.vectors[0] == 3.0).all()


def test_a_copy_has_memory_of_its_own() -> None:
    layout = Layout.of([ParameterSpec("a", (20,), "float32", 0)], servers=1)
    buffer = PartBuffer(layout, 0)
    copy = buffer.copy()
    buffer.vectors[0].fill_(1.0)
    assert not copy.vectors[0].any()
    assert [s.numel() for s in copy.segments] == [s.numel() for s in buffer.segments]


# What cannot be --------------------------------------------------------------------------------


def test_there_must_be_something_to_train() -> None:
    with pytest.raises(ConfigurationError, match="nothing to train"):
        FlatModel([[]], servers=1)


def test_one_device_only() -> None:
    model = small_model()
    model[2].to("meta")
    with pytest.raises(ConfigurationError, match=r"several devices \(cpu, meta\)"):
        flat(model)


def test_whole_numbers_cannot_be_trained() -> None:
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
    with pytest.raises(ConfigurationError, match="'steps' has dtype int64"):
        FlatModel([[("steps", parameter)]], servers=1)


def test_sparse_gradients_are_refused() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    buffers = flat(model)
    model.weight.grad = None
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigurationError, match=r"sparse=False"):
        buffers.collect_gradients()


def test_a_staged_models_gradients_are_copied_beside_it() -> None:
    model, plain = small_model(), small_model()
    buffers = FlatModel([list(model.named_parameters())], servers=1, staged=True)
    for each in (model, plain):
        backward(each)
        each[0].bias.grad = None
    part = buffers.part_gradients(0)
    buffers.collect_gradients()
    for placed in buffers.layout.vectors[0].placed:
        copied = part.vectors[0][placed.start : placed.stop]
        gradient = plain.get_parameter(placed.parameter.name).grad
        assert not copied.any() if gradient is None else torch.equal(copied, gradient.flatten())
