"""One process without servers: its own optimizer, and copies of its state."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trireme.ps.flat import FlatModel
from trireme.ps.messages import Applied
from trireme.ps.optimizers import spec_of
from trireme.ps.rule import Rule
from trireme.ps.snapshot import ModelState
from trireme.session.backends.local import Local


def trained(made: ModelState | None = None) -> tuple[Local, FlatModel, nn.Linear]:
    torch.manual_seed(1)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    flat = FlatModel([list(model.named_parameters())], servers=1)
    backend = Local(flat, optimizer)
    first = made or ModelState(0, {n: p.detach().clone() for n, p in flat.parameters.items()})
    backend.start(spec_of(optimizer), Rule(), lambda: first)
    return backend, flat, model


def step(backend: Local, flat: FlatModel) -> Any:
    for gradient in flat.gradients:
        gradient.fill_(1.0)
    backend.push(1.0)
    return backend.wait().verdict


def test_alone_the_users_optimizer_steps_and_a_copy_goes_on_where_it_was() -> None:
    backend, flat, model = trained()
    before = model.weight.detach().clone()
    assert [step(backend, flat) for _ in range(2)] == [Applied(1), Applied(2)]
    torch.testing.assert_close(model.weight.detach(), before - 0.5 * (1.0 + 1.9))
    state = backend.snapshot(state=True)
    assert set(state.optimizer) == {"weight/momentum_buffer", "bias/momentum_buffer"}
    again, other, continued = trained(state)
    assert (again.step, step(again, other), step(backend, flat)) == (2, Applied(3), Applied(3))
    assert torch.equal(continued.weight, model.weight)
