from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import dropout, dropout2d, scaled_dot_product_attention

from trireme.verification.recorder import OFF, states, turn_dropout_off


@pytest.fixture
def notes() -> Iterator[set[str]]:
    kernels = functional._VF  # type: ignore[attr-defined]
    before, attention = dict(vars(kernels)), functional.scaled_dot_product_attention
    found = set[str]()
    turn_dropout_off(nn.Identity(), found)
    yield found
    for name in vars(kernels).keys() - before.keys():
        delattr(kernels, name)
    functional.scaled_dot_product_attention = attention
    globals()["scaled_dot_product_attention"] = attention


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.Dropout2d(0.5), nn.AlphaDropout(0.5)])
def test_layers_drop_nothing_and_it_is_said(layer: nn.Module, notes: set[str]) -> None:
    x = torch.ones(4, 3, 5, 5)
    before = states()
    assert torch.equal(layer(x), x)
    assert states() == before
    assert notes == {OFF}


def test_functions_that_were_imported_before_drop_nothing(notes: set[str]) -> None:
    x = torch.ones(2, 64, 8)
    assert torch.equal(dropout(x, 0.5), x)
    assert torch.equal(dropout2d(x[None], 0.5, inplace=True), x[None])
    kept = scaled_dot_product_attention(x, x, x)
    assert notes == {OFF}
    assert torch.equal(scaled_dot_product_attention(x, x, x, None, 0.5), kept)
    assert torch.equal(scaled_dot_product_attention(x, x, x, dropout_p=0.5), kept)


def test_where_nothing_would_be_dropped_nothing_is_said(notes: set[str]) -> None:
    x = torch.ones(2, 3)
    assert torch.equal(functional.dropout(x, 0.5, training=False), x)
    assert torch.equal(functional.dropout(x, 0.0), x)
    assert not notes


def test_recurrent_layers_drop_nothing() -> None:
    layer, notes = nn.LSTM(2, 2, 2, dropout=0.5), set[str]()
    kernels = functional._VF  # type: ignore[attr-defined]
    before = dict(vars(kernels))
    attention = functional.scaled_dot_product_attention
    turn_dropout_off(layer, notes)
    for name in vars(kernels).keys() - before.keys():
        delattr(kernels, name)
    functional.scaled_dot_product_attention = attention
    globals()["scaled_dot_product_attention"] = attention
    assert layer.dropout == 0
    assert notes == {OFF}


def test_who_has_drawn_is_seen() -> None:
    before = states()
    assert states() == before
    torch.rand(1)
    assert states() != before
