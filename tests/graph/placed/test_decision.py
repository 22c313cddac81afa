"""What a decider knows of the program's optimizer."""

from __future__ import annotations

import torch
from torch import nn

from trireme.graph.config import GraphConfig
from trireme.graph.placed.decision import Decider


class Normalised(torch.optim.SGD):
    """Divides by the norm of all gradients, so that a part of the parameters is not enough."""


def test_optimizers_that_are_not_torchs_are_named_where_each_task_has_its_own() -> None:
    parameters = list(nn.Linear(2, 2).parameters())
    known = torch.optim.Adam(parameters)
    other = Normalised(parameters, lr=0.1)
    assert Decider.of(GraphConfig(), known, 0).warning == ""
    assert "its own parameters with Normalised" in Decider.of(GraphConfig(), other, 0).warning
    assert Decider.of(GraphConfig(), other, 1).warning == ""
