"""The LSTM: against torch's own layers, and what it carries from batch to batch."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from language.networks import LSTMLanguageModel
from torch import nn
from torch.nn import functional as F


def small(*, dropout: float = 0.0, carry: bool = False) -> LSTMLanguageModel:
    torch.manual_seed(0)
    return LSTMLanguageModel(19, 8, 2, dropout, carry=carry).double()


def some_tokens(rows: int = 3, time: int = 12) -> torch.Tensor:
    return torch.randint(19, (rows, time), generator=torch.Generator().manual_seed(1))


def loss_of(network: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(network(tokens).flatten(0, 1), tokens.flatten())


def test_shapes_and_parameters() -> None:
    network = small()
    assert [name for name, _ in network.named_children()] == [
        "embedding",
        "dropout",
        "lstm_0",
        "lstm_1",
        "head",
    ]
    wanted = 19 * 8 + 2 * (8 * 8 * 8 + 2 * 32) + 8 * 19 + 19
    assert sum(p.numel() for p in network.parameters()) == wanted
    assert network(some_tokens()).shape == (3, 12, 19)
    loss_of(network, some_tokens()).backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().sum() > 0, name
        if parameter.dim() == 1:
            assert (parameter == 0).all()
        else:
            assert 0.09 < parameter.abs().max() <= 0.1


def test_it_is_torchs_lstm_with_two_layers() -> None:
    network = small()
    stacked = nn.LSTM(8, 8, num_layers=2, batch_first=True).double()
    for layer in (0, 1):
        for name, parameter in network.get_submodule(f"lstm_{layer}.lstm").named_parameters():
            stacked.get_parameter(name.replace("l0", f"l{layer}")).data.copy_(parameter)
    outputs, _ = stacked(network.embedding(some_tokens()))
    assert torch.allclose(network(some_tokens()), network.head(outputs), atol=1e-12)


def test_carried_on_two_batches_read_as_one() -> None:
    tokens = some_tokens()
    whole = small()(tokens)
    network = small(carry=True)
    parts = [network(part) for part in tokens.split((5, 7), 1)]
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-12)
    again = network(tokens)
    assert not torch.allclose(again, whole, atol=1e-6), "it went on"
    network.reset_state()
    assert torch.equal(network(tokens), whole)


def test_without_carry_each_batch_begins_from_zero() -> None:
    network = small()
    assert torch.equal(network(some_tokens()), network(some_tokens()))


def test_gradients_end_where_the_batch_begins() -> None:
    first, second = some_tokens().split((5, 7), 1)
    network = small(carry=True)
    embedded = network.embedding(first).detach().requires_grad_()
    network.lstm_1(network.lstm_0(embedded))
    loss_of(network, second).backward()
    assert embedded.grad is None
    # Backward went through the second batch alone, so the same with a given state is the same.
    plain = small(carry=True)
    with torch.no_grad():
        plain(first)
    loss_of(plain, second).backward()
    for ours, wanted in zip(network.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.grad, wanted.grad, atol=1e-12)


def test_an_evaluation_begins_from_zero_and_leaves_training_as_it_was() -> None:
    first, second = some_tokens().split((5, 7), 1)
    undisturbed = small(carry=True)
    undisturbed(first)
    wanted = undisturbed(second)
    network = small(carry=True)
    network(first)
    text = some_tokens(4, 10)
    for _ in range(2):
        network.eval()
        with torch.inference_mode():
            parts = [network(part) for part in text.split(5, 1)]
        network.train()
        assert torch.allclose(torch.cat(parts, 1), small()(text), atol=1e-12)
    logits = network(second)
    assert torch.equal(logits, wanted)
    logits.sum().backward()  # nothing of inference mode is left in the state


def test_another_number_of_rows() -> None:
    network = small(carry=True)
    network(some_tokens(3))
    with pytest.raises(ValueError, match=r"of 2 rows cannot go on where one of 3 .* reset_state"):
        network(some_tokens(2))
    network.reset_state()
    assert network(some_tokens(2)).shape == (2, 12, 19)


def test_what_was_read_is_no_part_of_the_model() -> None:
    network = small(carry=True)
    names = set(network.state_dict())
    network(some_tokens())
    assert set(network.state_dict()) == names == {name for name, _ in network.named_parameters()}
    assert not list(network.buffers())
    copied = copy.deepcopy(network)
    assert torch.equal(copied(some_tokens()), network(some_tokens()))


def test_dropout_is_for_training() -> None:
    network = small(dropout=0.5)
    assert not torch.equal(network(some_tokens()), network(some_tokens()))
    assert torch.equal(network.eval()(some_tokens()), small().eval()(some_tokens()))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layers=0.*start at 1"):
        LSTMLanguageModel(19, 8, 0)


def test_carrying_on_pays() -> None:
    """The last token of a batch is asked for at the beginning of the next."""

    def trained(carry: bool) -> float:
        torch.manual_seed(0)
        network = LSTMLanguageModel(3, 8, 1, carry=carry)
        optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
        shown = torch.randint(2, (251, 16)).long()
        for before, now in pairwise(shown):
            optimizer.zero_grad()
            logits = network(torch.stack([torch.full_like(now, 2), now], 1))
            asked = F.cross_entropy(logits[:, 0], before)
            (asked + F.cross_entropy(logits[:, 1], now)).backward()
            optimizer.step()
        return asked.item()

    assert trained(carry=False) > 0.5
    assert trained(carry=True) < 0.1
