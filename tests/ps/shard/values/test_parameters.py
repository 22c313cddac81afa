"""The values that one server holds: updates, moving average, copies and what is loaded."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trireme.errors import Rejected
from trireme.ps.flat import PartBuffer, as_bytes
from trireme.ps.layout import Layout
from trireme.ps.messages import GroupSpec, OptimizerSpec, ParameterSpec
from trireme.ps.rule import Average, Rule
from trireme.ps.shard.values.gradient_sums import Total, squared_norm, total_of
from trireme.ps.shard.values.parameters import Values
from trireme.ps.shard.values.snapshot_tensors import Tensors, tensors_from
from trireme.ps.snapshot_messages import TensorSpec

PARAMETERS = [
    ParameterSpec("a", (40,), "float32", 0),
    ParameterSpec("b", (20,), "float64", 0),
    ParameterSpec("c", (10,), "float32", 1),
]
PLAIN = OptimizerSpec("SGD", (GroupSpec({"lr": 1.0}), GroupSpec({"lr": 0.5})))
MOMENTUM = OptimizerSpec("SGD", (GroupSpec({"lr": 1.0, "momentum": 0.5}),) * 2)


def layout_of(servers: int = 1) -> Layout:
    return Layout.of(PARAMETERS, servers=servers, slots=8)


def buffer_of(value: float, layout: Layout | None = None, server: int = 0) -> PartBuffer:
    buffer = PartBuffer(layout or layout_of(), server)
    for vector in buffer.vectors:
        vector.fill_(value)
    return buffer


def whole(layout: Layout, start: float = 0.0) -> Tensors:
    """Every element another value, as one range a vector."""
    tensors: list[tuple[TensorSpec, torch.Tensor]] = []
    for vector in layout.vectors:
        spec = TensorSpec("values", vector.dtype, vector.dtype, 0, vector.length)
        values = torch.arange(vector.length, dtype=torch.float64) + start
        tensors.append((spec, values.to(getattr(torch, vector.dtype))))
    return tensors


def values_of(
    optimizer: OptimizerSpec = PLAIN, average: Average | None = None, layout: Layout | None = None
) -> Values:
    values = Values(layout or layout_of(), 0, optimizer, Rule(average=average))
    values.load(0, whole(layout_of()))
    return values


def apply(values: Values, update: Total, hyper: Sequence[GroupSpec] | None, step: int) -> None:
    """Makes a step, as a shard does."""
    if hyper is not None:
        values.optimizer.set_hyper(hyper)
    values.optimizer.step(update.gradients, update.divisor, update.absent)
    values.average(step)


def test_an_update_is_the_optimizers_with_each_groups_learning_rate() -> None:
    values = values_of()
    apply(values, Total(buffer_of(2.0)), None, step=1)
    expected = torch.arange(64, dtype=torch.float32) - 2.0
    expected[48:] += 1.0
    assert torch.equal(values.buffer.vectors[0], expected)
    assert torch.equal(values.buffer.vectors[1], torch.arange(24, dtype=torch.float64) - 2.0)


def test_hyper_parameters_come_with_an_update_and_stay() -> None:
    values = values_of()
    faster = (GroupSpec({"lr": 10.0}), GroupSpec({"lr": 0.5}))
    apply(values, Total(buffer_of(1.0)), faster, step=1)
    apply(values, Total(buffer_of(1.0)), None, step=2)
    assert values.buffer.vectors[0][0] == -20.0
    assert values.buffer.vectors[0][48] == 47.0


def test_the_average_follows_the_values() -> None:
    average = Average(0.5, warm_up=False)
    values = values_of(average=average)
    start = values.buffer.vectors[0].clone()
    apply(values, Total(buffer_of(2.0)), None, step=1)
    apply(values, Total(buffer_of(2.0)), None, step=2)
    copied = {s.key: t for s, t in values.copy(state=False) if s.vector == "float32"}
    # 0.5 (0.5 x + 0.5 (x - 2)) + 0.5 (x - 4) = x - 2.5
    assert torch.equal(copied["average"][:48], start[:48] - 2.5)
    assert torch.equal(copied["values"][:48], start[:48] - 4.0)


def test_the_average_begins_at_the_first_values() -> None:
    values = values_of(average=Average(0.9))
    copied = dict((s.key, t) for s, t in values.copy(state=False) if s.vector == "float64")
    assert torch.equal(copied["average"], copied["values"])


def test_a_copy_does_not_follow_the_values() -> None:
    values = values_of(MOMENTUM)
    apply(values, Total(buffer_of(1.0)), None, step=1)
    copied = values.copy(state=True)
    before = [tensor.clone() for _, tensor in copied]
    apply(values, Total(buffer_of(1.0)), None, step=2)
    assert all(torch.equal(t, b) for (_, t), b in zip(copied, before, strict=True))
    assert {spec.key for spec, _ in copied} == {"values", "state/momentum_buffer"}
    assert {spec.key for spec, _ in values.copy(state=False)} == {"values"}


@pytest.mark.parametrize("counts", [(1, 2), (2, 3), (3, 1), (4, 3)], ids=str)
def test_a_copy_of_some_servers_is_loaded_by_others(counts: tuple[int, int]) -> None:
    before, after = counts
    old, average = layout_of(before), Average(0.5)
    copied: list[tuple[TensorSpec, torch.Tensor]] = []
    for server in range(before):
        values = Values(old, server, MOMENTUM, Rule(average=average))
        values.load(0, whole(old))
        apply(values, Total(buffer_of(3.0, old, server)), None, step=1)
        copied += values.copy(state=True)
    new = layout_of(after)
    loaded = [Values(new, server, MOMENTUM, Rule(average=average)) for server in range(after)]
    for server, values in enumerate(loaded):
        values.load(0, copied)
        apply(values, Total(buffer_of(3.0, new, server)), None, step=2)
    reference = values_of(MOMENTUM, average)
    for step in (1, 2):
        apply(reference, Total(buffer_of(3.0)), None, step=step)
    for key in ("values", "average", "state/momentum_buffer"):
        for dtype in ("float32", "float64"):
            assert torch.equal(
                joined([c for values in loaded for c in values.copy(state=True)], key, dtype),
                joined(reference.copy(state=True), key, dtype),
            )


def joined(tensors: Tensors, key: str, vector: str) -> torch.Tensor:
    pieces = [(s.start, t) for s, t in tensors if s.key == key and s.vector == vector]
    return torch.cat([tensor for _, tensor in sorted(pieces, key=lambda piece: piece[0])])


@pytest.mark.parametrize("missing", [0, 1])
def test_values_that_do_not_cover_the_part_are_refused(missing: int) -> None:
    tensors = [entry for index, entry in enumerate(whole(layout_of())) if index != missing]
    with pytest.raises(Rejected, match="the values to load cover"):
        Values(layout_of(), 0, PLAIN, Rule()).load(0, tensors)


# Means -----------------------------------------------------------------------------------------


def mean_of(
    weights: Sequence[float], gradients: Sequence[PartBuffer], out: PartBuffer
) -> PartBuffer:
    return total_of(weights, gradients, out).mean()


def test_one_gradient_is_its_own_mean_without_a_copy() -> None:
    gradient, out = buffer_of(3.0), buffer_of(0.0)
    assert mean_of((2.5,), (gradient,), out) is gradient
    assert all((vector == 3.0).all() for vector in gradient.vectors)


def test_equal_weights_keep_whole_numbers_exact() -> None:
    gradients = [buffer_of(v) for v in (3.0, 6.0, 15.0)]
    mean = mean_of((0.1, 0.1, 0.1), gradients, buffer_of(77.0))
    assert all((vector == 8.0).all() for vector in mean.vectors)


@given(weights=st.lists(st.sampled_from([1.0, 2.0, 4.0, 12.0]), min_size=2, max_size=6))
def test_the_mean_is_weighted_and_leaves_the_gradients_alone(weights: Sequence[float]) -> None:
    gradients = [buffer_of(float(10 * i + 1)) for i in range(len(weights))]
    mean = mean_of(weights, gradients, buffer_of(float("nan")))
    expected = sum(w * (10 * i + 1) for i, w in enumerate(weights)) / sum(weights)
    for vector in mean.vectors:
        torch.testing.assert_close(vector, torch.full_like(vector, expected), rtol=1e-6, atol=0)
    for index, gradient in enumerate(gradients):
        assert all((vector == 10 * index + 1).all() for vector in gradient.vectors)


def test_the_squared_norm_is_summed_in_double_precision() -> None:
    buffer = buffer_of(0.0)
    buffer.vectors[0].fill_(1e25)
    buffer.vectors[1].fill_(2.0)
    assert squared_norm(buffer) == pytest.approx(64e50 + 4 * 24, rel=1e-6)
    assert squared_norm(PartBuffer(Layout.of([], servers=1), 0)) == 0.0


# Payloads --------------------------------------------------------------------------------------


def payload_of(tensors: Tensors) -> list[memoryview]:
    return [as_bytes(tensor) for _, tensor in tensors if tensor.numel()]


def test_a_payload_becomes_tensors_again() -> None:
    values = Values(layout_of(), 0, OptimizerSpec("Adam", PLAIN.groups), Rule())
    values.load(0, whole(layout_of()))
    apply(values, Total(buffer_of(1.0)), None, step=1)
    copied = values.copy(state=True)
    assert any(spec.group >= 0 for spec, _ in copied), "Adam counts steps"
    for payload in (payload_of(copied), [memoryview(bytearray().join(payload_of(copied)))]):
        again = tensors_from([spec for spec, _ in copied], payload)
        assert len(again) == len(copied)
        for (spec, tensor), (same, expected) in zip(again, copied, strict=True):
            assert spec == same
            assert torch.equal(tensor, expected)


@pytest.mark.parametrize(
    ("specs", "size", "said"),
    [
        ([TensorSpec("values", "float32", "float32", 0, 4)], 12, "ends at 12 bytes, inside values"),
        ([TensorSpec("values", "float32", "float32", 0, 4)], 20, "has 20 bytes and its tensors 16"),
        ([TensorSpec("values", "float32", "float32", 4, 0)], 16, "makes no sense"),
        ([TensorSpec("values", "no_such_thing", "float32", 0, 4)], 16, "makes no sense"),
        ([TensorSpec("values", "save", "float32", 0, 4)], 16, "makes no sense"),
    ],
)
def test_a_payload_that_does_not_fit_is_refused(
    specs: list[TensorSpec], size: int, said: str
) -> None:
    with pytest.raises(Rejected, match=said):
        tensors_from(specs, [memoryview(bytearray(size))])
