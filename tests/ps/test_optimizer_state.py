"""The state of an optimizer, by the names of the parameters that it belongs to."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trireme.errors import ConfigurationError
from trireme.ps.joint_optimizer import JointOptimizer
from trireme.ps.layout import Layout
from trireme.ps.messages import ParameterSpec
from trireme.ps.optimizers import state_names
from trireme.ps.snapshot import assemble
from trireme.ps.snapshot_messages import Snapshot, TensorSpec


def test_states_are_named_as_the_optimizer_counts_its_parameters() -> None:
    model = nn.Linear(4, 2)
    frozen = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([model.bias, frozen, model.weight], lr=0.5)
    assert state_names(optimizer, dict(model.named_parameters())) == ["bias", None, "weight"]


def test_a_parameter_has_one_optimizer() -> None:
    model = nn.Linear(4, 2)
    first = torch.optim.SGD([model.weight], lr=0.5)
    assert JointOptimizer([first, torch.optim.Adam([model.bias])]).optimizers[0] is first
    with pytest.raises(ConfigurationError, match=r"optimizers 0 and 1 .* shape \(2, 4\) in common"):
        JointOptimizer([first, torch.optim.Adam(model.parameters())])


def test_averages_of_a_snapshot_are_no_state_of_the_optimizer() -> None:
    layout = Layout.of([ParameterSpec("a", (2,), "float32", 0)], servers=1)
    length = layout.vectors[0].length
    parts = [
        (TensorSpec(key, "float32", "float32", 0, length), torch.full((length,), value))
        for key, value in (("values", 1.0), ("average", 2.0), ("state/m", 3.0))
    ]
    state = assemble(layout, [(Snapshot(5, tuple(spec for spec, _ in parts), (), ()), parts)])
    named = (state.values, state.average, state.optimizer)
    assert [list(each) for each in named] == [["a"], ["a"], ["a/m"]]
    assert [float(next(iter(each.values()))[0]) for each in named] == [1.0, 2.0, 3.0]
