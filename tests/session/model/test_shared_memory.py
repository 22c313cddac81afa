"""Parameters that are views of one memory are refused by name, and not those side by side in it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import trireme
from trireme.errors import ConfigurationError
from trireme.session.model.shared_memory import check_shared_memory


def model() -> nn.ModuleDict:
    return nn.ModuleDict({"encoder": nn.Linear(6, 4), "decoder": nn.Linear(4, 6)})


def transposed(made: nn.ModuleDict) -> None:
    made.decoder.weight = nn.Parameter(made.encoder.weight.t())


def wrapped_again(made: nn.ModuleDict) -> None:
    made.decoder.bias = nn.Parameter(made.encoder.weight.view(-1)[:6])


def by_data(made: nn.ModuleDict) -> None:
    made.decoder.weight.data = made.encoder.weight.data.t()


def frozen(made: nn.ModuleDict) -> None:
    transposed(made)
    made.encoder.weight.requires_grad_(False)


def column(made: nn.ModuleDict) -> None:
    made.decoder.bias = nn.Parameter(torch.cat([made.encoder.weight, torch.zeros(2, 6)])[:, 1])
    made.encoder.bias = nn.Parameter(made.decoder.bias.data[2:6:1])


def buffer(made: nn.ModuleDict) -> None:
    made.decoder.register_buffer("first", made.encoder.weight.detach()[0])


SHARED: dict[Callable[[nn.ModuleDict], None], str] = {
    transposed: "'encoder.weight' and parameter 'decoder.weight'.*use the same Parameter",
    wrapped_again: "'encoder.weight' and parameter 'decoder.bias'",
    by_data: "'encoder.weight' and parameter 'decoder.weight'",
    frozen: "'encoder.weight' and parameter 'decoder.weight'",
    column: "'encoder.bias' and parameter 'decoder.bias'",
    buffer: "'encoder.weight' and buffer 'decoder.first'.*compute the buffer in forward",
}


@pytest.mark.parametrize("share", SHARED)
def test_a_view_of_a_trained_parameter_is_refused_by_name(
    share: Callable[[nn.ModuleDict], None],
) -> None:
    made = model()
    share(made)
    sgd = torch.optim.SGD(made.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match=SHARED[share]):
        trireme.distribute(made, sgd)
    with pytest.raises(ConfigurationError, match=SHARED[share]):
        trireme.Session(made, nn.MSELoss(), sgd).__enter__()


def test_parameters_side_by_side_in_one_memory_are_none() -> None:
    """As those of an RNN on a GPU, or the halves of one matrix."""
    made, memory = model(), torch.randn(10, 8)
    made.encoder.weight = nn.Parameter(memory[:4, :6])
    made.encoder.bias = nn.Parameter(memory[5, ::2])
    made.decoder.bias = nn.Parameter(memory[5, 1::2])
    check_shared_memory(made, made.parameters())


def test_one_parameter_in_two_places_and_views_of_what_is_not_trained_are_none() -> None:
    made = model()
    made["again"] = made.encoder
    made.register_buffer("one", torch.ones(3))
    made.register_buffer("another", made.one[1:])
    check_shared_memory(made, made.parameters())
    transposed(made)
    check_shared_memory(made, [made.encoder.bias])
