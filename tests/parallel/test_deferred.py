"""A model that is built without memory gets the values of an ordinary construction."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trireme.errors import ConfigurationError
from trireme.parallel.deferred import Deferred, with_untouched_memory


class Odd(nn.Module):
    """Fills its tensors in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.table = nn.Embedding(7, 4, padding_idx=1)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight
        self.recurrent = nn.LSTM(4, 4)
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("steps", torch.arange(3.0))
        self.mask = torch.rand(2)
        self.free = nn.Parameter(torch.randn(3))
        nn.init.trunc_normal_(self.first.weight)
        nn.init.orthogonal_(self.recurrent.weight_hh_l0)
        self.layers = nn.TransformerEncoder(  # copies of one layer
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2
        )
        self.apply(self._fill)
        nn.init.trunc_normal_(self.head.weight, std=0.02, a=-0.01, b=0.05)

    @staticmethod
    def _fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_()
            nn.init.kaiming_uniform_(module.weight)


def seed() -> None:
    torch.manual_seed(3)


@pytest.mark.parametrize("start", [0, 1])
def test_values_and_random_numbers_are_those_of_a_construction(start: int) -> None:
    seed()
    wanted = Odd()
    state = torch.get_rng_state()
    deferred = Deferred(Odd, seed)
    model = deferred.model
    parameters = dict(model.named_parameters())
    assert all(parameter.is_meta for parameter in parameters.values())
    mine = list(parameters)[start::2]
    deferred.materialise(mine)
    assert torch.equal(torch.get_rng_state(), state)
    for name, expected in wanted.named_parameters():
        found = parameters[name]
        assert found is model.get_parameter(name) and found.requires_grad
        assert found.is_meta if name not in mine else torch.equal(found, expected)
    for name, expected in wanted.named_buffers():
        assert torch.equal(model.get_buffer(name), expected)
    assert torch.equal(model.mask, wanted.mask)
    assert model.head.weight is model.table.weight


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        if self.linear.weight.sum().item() > 0:
            self.linear.requires_grad_(False)


def test_a_constructor_that_reads_values_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="cannot be built without memory for all of it"):
        Deferred(Reading, seed)


def test_lent_memory_is_given_back() -> None:
    model = Deferred(lambda: nn.Linear(2, 3), seed).model
    with with_untouched_memory(model):
        assert model(torch.zeros(1, 2)).shape == (1, 3)
    assert model.weight.is_meta
