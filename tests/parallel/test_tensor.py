"""Which layers tensor parallelism cuts, and which it refuses."""

from __future__ import annotations

import re

import pytest
from torch import nn

from trireme.errors import ConfigurationError
from trireme.models import MLP, LeNet5, Transformer
from trireme.parallel.tensor import derive, resolve


def test_linear_layers_are_cut_in_pairs() -> None:
    assert derive(MLP(8, 6, 4, 2), 2) == {
        "hidden1": "column",
        "hidden2": "row",
        "output": "gathered",
    }


def test_what_lies_between_two_must_be_elementwise() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    assert derive(model, 2) == {"0": "gathered", "2": "gathered"}


def test_blocks_are_cut_as_megatron_does() -> None:
    plan = derive(Transformer(10, 8, 4, 2, 6), 2)
    block = {name.removeprefix("block_1."): cut for name, cut in plan.items() if "block_1" in name}
    assert block == {
        "attention.query": "column",
        "attention.key": "column",
        "attention.value": "column",
        "attention.output": "row",
        "feed_forward.expand": "column",
        "feed_forward.contract": "row",
    }


def test_convolutions_stay_whole_and_are_refused_by_name() -> None:
    assert all(name.startswith("classifier") for name in derive(LeNet5(), 2))
    message = (
        "features.0 is a convolution, and torch computes convolutions with cut channels wrongly"
    )
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        resolve(LeNet5(), {"features.0": "column"}, 2)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"hidden1": "rows"}, "'rows' is no cut: there are column, row, gathered"),
        ({"nothing.*": "row"}, "matches no module of MLP"),
        ({"relu1": "row"}, "relu1"),
        ({"hidden1": "column"}, "hidden1"),
    ],
)
def test_what_cannot_be_cut_is_refused(plan: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        resolve(MLP(8, 7, 2), plan, 2)


def test_heads_are_shared_whole() -> None:
    with pytest.raises(ConfigurationError, match=r"block_0\.attention has 3 heads, which 2"):
        derive(Transformer(10, 12, 3, 1, 6), 2)
