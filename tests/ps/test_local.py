"""One process without servers: what a client is to it, and optimizers whose state has names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from trireme.errors import ConfigurationError
from trireme.ps.dense import FlatModel
from trireme.ps.joint import JointOptimizer
from trireme.ps.layout import Layout
from trireme.ps.local import LocalClient, state_names
from trireme.ps.messages import Applied, ParameterSpec, Snapshot, TensorSpec
from trireme.ps.optim import spec_of
from trireme.ps.rule import Rule
from trireme.ps.snapshot import ModelState, assemble


def trained(made: ModelState | None = None) -> tuple[LocalClient, FlatModel, nn.Linear]:
    torch.manual_seed(1)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    flat = FlatModel([list(model.named_parameters())], servers=1)
    client = LocalClient(flat, optimizer)
    assert not client.attach(spec_of(optimizer), Rule())
    client.load(made or ModelState(0, {n: p.detach().clone() for n, p in flat.parameters.items()}))
    client.pull()
    return client, flat, model


def step(client: LocalClient, flat: FlatModel) -> Any:
    for gradient in flat.gradients:
        gradient.fill_(1.0)
    client.push(1.0)
    return client.wait().verdict


def test_alone_the_users_optimizer_steps_and_a_copy_goes_on_where_it_was() -> None:
    client, flat, model = trained()
    before = model.weight.detach().clone()
    assert [step(client, flat) for _ in range(2)] == [Applied(1), Applied(2)]
    torch.testing.assert_close(model.weight.detach(), before - 0.5 * (1.0 + 1.9))
    state = client.snapshot(state=True)
    assert set(state.optimizer) == {"weight/momentum_buffer", "bias/momentum_buffer"}
    again, other, continued = trained(state)
    assert (again.step, step(again, other), step(client, flat)) == (2, Applied(3), Applied(3))
    assert torch.equal(continued.weight, model.weight)


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
