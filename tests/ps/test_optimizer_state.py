"""The state of an optimizer, by the names of the parameters that it belongs to."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trireme.errors import ConfigurationError, Rejected
from trireme.ps.layout import Layout
from trireme.ps.messages import ParameterSpec
from trireme.ps.optimizers import JointOptimizer, export_state, restore_state, state_names
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


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.5)


def test_a_state_is_restored_by_names() -> None:
    trained, fresh = nn.Linear(4, 2), nn.Linear(4, 2)
    optimizer, other = adam(trained), adam(fresh)
    trained(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    state = export_state(optimizer, dict(trained.named_parameters()))
    unknown = {"gone/exp_avg": torch.zeros(1)}
    restore_state(other, dict(fresh.named_parameters()), {**state, **unknown})
    again = export_state(other, dict(fresh.named_parameters()))
    assert sorted(again) == sorted(state)
    assert all(torch.equal(again[name], tensor) for name, tensor in state.items())


def test_a_state_that_lacks_something_is_another_optimizers() -> None:
    model = nn.Linear(4, 2)
    state = {"weight/exp_avg": torch.zeros(2, 4), "weight/step": torch.tensor(1.0)}
    with pytest.raises(Rejected, match="the checkpoint has no 'exp_avg_sq', from which Adam"):
        restore_state(adam(model), dict(model.named_parameters()), state)


def test_averages_of_a_snapshot_are_no_state_of_the_optimizer() -> None:
    layout = Layout.of([ParameterSpec("a", (2,), "float32", 0)], servers=1)
    length = layout.vectors[0].length
    parts = [
        (TensorSpec(key, "float32", "float32", 0, length), torch.full((length,), value))
        for key, value in (("values", 1.0), ("average", 2.0), ("state/m", 3.0))
    ]
    state = assemble(
        layout, [(Snapshot(5, tuple(spec for spec, _ in parts), (), (), {"d": 9}), parts)]
    )
    assert state.sizes == {"d": 9}
    named = (state.values, state.average, state.optimizer)
    assert [list(each) for each in named] == [["a"], ["a"], ["a/m"]]
    assert [float(next(iter(each.values()))[0]) for each in named] == [1.0, 2.0, 3.0]
