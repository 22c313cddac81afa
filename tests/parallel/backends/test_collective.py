"""Processes that train without servers: what they share besides gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.process_groups import ProcessGroup, run_process_group
from trireme.launch.environment import current_task
from trireme.session.session import Session

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

LARGE = 3 << 20  # numbers: 12 MiB, which a store does not take as one value


class Remembers(nn.Module):
    """Has a large buffer, which each process fills with its rank."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("memory", torch.zeros(LARGE))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.memory.fill_(current_task().group.rank)
        return self.linear(inputs)


def train() -> list[float]:
    torch.manual_seed(0)
    model = Remembers()
    session = Session(
        model,
        nn.CrossEntropyLoss(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        max_steps=2,
        checkpoint=None,
    )
    inputs = torch.linspace(-1, 1, 80).reshape(20, 4)
    with session:
        for batch in session.loader(TensorDataset(inputs, inputs[:, :2].argmax(1)), 5):
            session.step(batch)
    return model.memory.unique().tolist()


def test_the_mean_of_large_buffers_is_in_the_model_at_the_end() -> None:
    assert run_process_group(ProcessGroup(workers=2), train).values == [[0.5], [0.5]]
