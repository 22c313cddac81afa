from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional

from trireme.verification.draws import Dropout, states


@pytest.fixture
def dropout() -> Iterator[Dropout]:
    names = ["dropout", "dropout1d", "dropout2d", "dropout3d", "scaled_dot_product_attention"]
    before = {name: getattr(functional, name) for name in names}
    made = Dropout(follows=True)
    made.install(nn.Identity())
    yield made
    for name, function in before.items():
        setattr(functional, name, function)


def dropped(dropout: Dropout, x: torch.Tensor, positions: list[int]) -> torch.Tensor:
    dropout.begin()
    dropout.examples(positions)
    layer = nn.Dropout(0.5)
    return layer(layer(x))


@pytest.mark.parametrize("shape", [(8, 30), (8, 5, 6), (24, 10), (5, 8, 3)])
def test_each_example_loses_the_same_whoever_computes_it(
    dropout: Dropout, shape: tuple[int, ...]
) -> None:
    x = torch.ones(shape)
    dim = 1 if shape == (5, 8, 3) else 0
    whole = dropped(dropout, x, list(range(100, 108)))
    half = x.split(shape[dim] // 2, dim)
    parts = [
        dropped(dropout, each, list(range(100 + 4 * i, 104 + 4 * i))) for i, each in enumerate(half)
    ]
    assert torch.equal(whole, torch.cat(parts, dim))
    assert 0.1 < float((whole == 0).float().mean()) < 0.95
    assert dropped(dropout, x, list(range(200, 208))).ne(whole).any()
    assert not dropout.notes


def test_two_layers_drop_others(dropout: Dropout) -> None:
    dropout.examples([1, 2])
    assert functional.dropout(torch.ones(2, 99)).ne(functional.dropout(torch.ones(2, 99))).any()


def test_the_mean_stays_and_evaluation_drops_nothing(dropout: Dropout) -> None:
    dropout.examples(list(range(50)))
    assert float(functional.dropout(torch.ones(50, 400), 0.25).mean()) == pytest.approx(1, abs=0.03)
    assert torch.equal(functional.dropout(torch.ones(50, 2), training=False), torch.ones(50, 2))


def test_whole_channels_are_dropped(dropout: Dropout) -> None:
    dropout.examples([0, 1])
    found = functional.dropout2d(torch.ones(2, 16, 4, 4))
    assert {float(each) for each in found.mean((2, 3)).flatten()} == {0.0, 2.0}


def test_where_examples_cannot_be_told_dropout_is_off_and_said(dropout: Dropout) -> None:
    dropout.examples([0, 1, 2])
    x = torch.ones(7, 5)
    assert torch.equal(functional.dropout(x), x)
    assert any("cannot be told" in note for note in dropout.notes)
    q = torch.ones(2, 3, 4)
    functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    assert any("attention" in note for note in dropout.notes)


def test_no_generator_moves(dropout: Dropout) -> None:
    before = states()
    dropped(dropout, torch.ones(4, 4), [1, 2, 3, 4])
    assert states() == before
    torch.rand(1)
    assert states() != before
