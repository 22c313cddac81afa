"""What has changed has the name of its parameter, however copies divide their state."""

from __future__ import annotations

import torch

from trireme.corruption.digests import Flip
from trireme.corruption.naming import by_parameter, described, values_of
from trireme.ps.layout import Layout
from trireme.ps.messages import ParameterSpec
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


def test_a_bit_has_the_name_of_the_parameter_that_it_is_in() -> None:
    values = values_of(LAYOUT, [torch.zeros(32)])
    assert described(LAYOUT, values, Flip(0, 3, 1 << 33), "") == (
        "bit 1 of element 7 of 'one.weight'"
    )
    assert described(LAYOUT, values, Flip(0, 8, 1 << 5), "") == "bit 5 of element 0 of 'one.bias'"
    part = [held("state/exp_avg", 16, 32), held("state/step", 0, 32, 0)]
    assert described(LAYOUT, part, Flip(0, 1, 1), "") == (
        "bit 0 of element 2 of exp_avg of 'one.bias'"
    )
    assert described(LAYOUT, part, Flip(1, 0, 4), "") == "bit 2 of state/step of parameter group 0"
    assert described(LAYOUT, part, None, "its state") == "several words of its state"


def test_copies_that_divide_their_state_otherwise_have_the_same_names() -> None:
    whole = [held("values", 0, 32), held("state/step", 0, 32, 0), held("state/sum", 0, 32)]
    apart = [
        *[held("values", 0, 32), held("state/step", 0, 32, 0), held("state/sum", 0, 16)],
        *[held("state/step", 0, 32, 0), held("state/sum", 16, 32)],
    ]
    one, other = by_parameter(LAYOUT, whole), by_parameter(LAYOUT, apart)
    assert list(one) == list(other) == sorted(one)
    assert all(torch.equal(one[name], other[name]) for name in one)
