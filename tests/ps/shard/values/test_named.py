"""What has changed has the name of its parameter, however copies divide their state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from trireme.ps.layout import Layout
from trireme.ps.messages import ParameterSpec
from trireme.ps.shard.values.parameters import Values
from trireme.ps.snapshot_messages import TensorSpec

LAYOUT = Layout.of(
    [
        ParameterSpec("one.weight", (3, 5), "float32", 0),
        ParameterSpec("one.bias", (4,), "float32", 0),
    ],
    servers=1,
)


def held(key: str, start: int, stop: int, group: int = -1) -> tuple[TensorSpec, torch.Tensor]:
    length = 1 if group >= 0 else stop - start
    spec = TensorSpec(key, "float32", "float32", start, stop, group)
    return spec, torch.arange(float(start), float(start + length))


def values(*tensors: tuple[TensorSpec, torch.Tensor]) -> Any:
    return SimpleNamespace(buffer=SimpleNamespace(layout=LAYOUT), live=lambda state: tensors)


def test_each_part_of_a_parameter_has_its_name_and_the_padding_behind_it() -> None:
    found = Values.named(values(held("state/step", 0, 32, 0), held("values", 8, 32)))
    assert [(name, tensor[0], len(tensor)) for name, tensor in found] == [
        ("state/step of parameter group 0", 0.0, 1),
        ("values of 'one.bias'", 16.0, 16),
        ("values of 'one.weight'", 8.0, 8),
    ]


def test_copies_that_divide_their_state_otherwise_have_the_same_names() -> None:
    whole = [held("values", 0, 32), held("state/step", 0, 32, 0), held("state/sum", 0, 32)]
    apart = [
        *[held("values", 0, 32), held("state/step", 0, 32, 0), held("state/sum", 0, 16)],
        *[held("state/step", 0, 32, 0), held("state/sum", 16, 32)],
    ]
    one, other = dict(Values.named(values(*whole))), dict(Values.named(values(*apart)))
    assert list(one) == list(other) == sorted(one)
    assert all(torch.equal(one[name], other[name]) for name in one)
