"""Which layers tensor parallelism cuts, and which it refuses."""

from __future__ import annotations

import re

import pytest
from images.networks import LeNet5
from language.networks import Transformer
from torch import nn

from trireme.errors import ConfigurationError
from trireme.models import MLP
from trireme.parallel.tensor_parallel import attentions, derive, resolve


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
        "features.0 is a convolution, and torch computes convolutions with split channels wrongly"
    )
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        resolve(LeNet5(), {"features.0": "column"}, 2)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"hidden1": "rows"}, "'rows' is not a split: use one of column, row, gathered"),
        ({"nothing.*": "row"}, "matches no module of MLP"),
        ({"relu1": "row"}, "relu1"),
        ({"hidden1": "column"}, "hidden1"),
    ],
)
def test_what_cannot_be_cut_is_refused(plan: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        resolve(MLP(8, 7, 2), plan, 2)


def test_heads_are_shared_whole() -> None:
    message = r"block_0\.attention has 3 heads, which cannot be divided evenly among 2"
    with pytest.raises(ConfigurationError, match=message):
        derive(Transformer(10, 12, 3, 1, 6), 2)


class Attention(nn.Module):
    """As others write it: how many heads there are stands in an attribute."""

    def __init__(self, names: tuple[str, str, str, str], width: int = 8, **counts: int) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(width, width))
        for name, value in counts.items():
            setattr(self, name, value)


LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj")


class Bert(nn.Module):
    """The names of BERT's layers: attention in two modules, and a feed-forward part in two."""

    def __init__(self) -> None:
        super().__init__()
        inner = Attention(("query", "key", "value", "dense"), attention_head_size=2)
        del inner.dense
        inner.num_attention_heads, inner.all_head_size = 4, 8
        self.attention = nn.Module()
        self.attention.self = inner
        self.attention.output = nn.Module()
        self.attention.output.dense = nn.Linear(8, 8)
        self.attention.output.norm = nn.LayerNorm(8)
        self.intermediate, self.output = nn.Module(), nn.Module()
        self.intermediate.dense, self.output.dense = nn.Linear(8, 16), nn.Linear(16, 8)


def test_bert_is_cut_by_its_heads() -> None:
    model = Bert()
    assert derive(model, 2) == {
        "attention.self.query": "column",
        "attention.self.key": "column",
        "attention.self.value": "column",
        "attention.output.dense": "row",
        "intermediate.dense": "column",
        "output.dense": "row",
    }
    (attention,) = attentions(model)
    attention.divide_heads(2)
    assert (model.attention.self.num_attention_heads, model.attention.self.all_head_size) == (2, 4)
    assert model.attention.self.attention_head_size == 2


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"num_heads": 1}, "the Attention has 1 heads, which cannot be divided evenly among 2"),
        ({"head_dim": 8}, "the Attention has 1 heads, which cannot be divided evenly among 2"),
        (
            {"num_heads": 4, "num_key_value_heads": 1},
            "the Attention has 1 heads, which cannot be divided evenly among 2",
        ),
        ({}, "does not give its number of heads"),
    ],
)
def test_attention_whose_heads_cannot_be_shared_is_refused(
    counts: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        derive(Attention(LLAMA, **counts), 2)
    plan = {"*[qkv]_proj": "column", "o_proj": "row"}
    with pytest.raises(ConfigurationError, match=message):
        resolve(Attention(LLAMA, **counts), plan, 2)


def test_a_norm_over_all_heads_is_refused() -> None:
    model = Attention(LLAMA, num_heads=4)
    model.q_norm = nn.LayerNorm(8)
    with pytest.raises(ConfigurationError, match=r"q_norm\.weight applies to all heads at once"):
        derive(model, 2)
    model.q_norm = nn.LayerNorm(2)  # of one head
    assert set(derive(model, 2)) == set(LLAMA)


def test_what_holds_query_key_and_value_as_one_stays_whole() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2), "o_proj": nn.Linear(8, 8)})
    assert derive(model, 2) == {}


def test_tied_weights_stay_whole_and_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 6))
    model[2].weight = model[0].weight
    assert derive(model, 2) == {"4": "gathered"}
    with pytest.raises(ConfigurationError, match=r"2\.weight is tied to another layer's"):
        resolve(model, {"2": "column"}, 2)


def test_a_layer_before_a_tied_one_is_gathered() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model.register_parameter("also", model[2].weight)
    assert derive(model, 2) == {"0": "gathered"}
