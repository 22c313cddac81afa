"""The transformer: against its formulas, its shape for those who cut it, and that it learns."""

from __future__ import annotations

import math
from collections import OrderedDict

import pytest
import torch
from language.networks import Attention, Transformer
from torch import nn
from torch.nn import functional as F


def small(**changes: float) -> Transformer:
    torch.manual_seed(0)
    sizes = {"vocabulary": 23, "width": 12, "heads": 3, "layers": 2, "context": 9}
    return Transformer(**{**sizes, **changes})  # type: ignore[arg-type]


def some_tokens(rows: int = 4, time: int = 9) -> torch.Tensor:
    return torch.randint(23, (rows, time), generator=torch.Generator().manual_seed(1))


def test_shapes_and_parameters() -> None:
    network = small()
    block = 2 * (2 * 12) + 4 * (12 * 12 + 12) + (12 * 48 + 48) + (48 * 12 + 12)
    wanted = (23 + 9) * 12 + 2 * block + 2 * 12 + (12 * 23 + 23)
    assert sum(p.numel() for p in network.parameters()) == wanted
    assert network(some_tokens()).shape == (4, 9, 23)
    assert network(some_tokens(1, 1)).shape == (1, 1, 23)
    logits = network(some_tokens())
    F.cross_entropy(logits.flatten(0, 1), some_tokens().flatten()).backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None
        # A bias of the keys moves all scores of a query alike: its gradient is zero but for bits.
        assert name.endswith("key.bias") or parameter.grad.abs().sum() > 0, name


def test_any_cut_between_children_makes_stages() -> None:
    network = small(layers=3)
    children = list(network.named_children())
    assert [name for name, _ in children] == [
        "embedding",
        "block_0",
        "block_1",
        "block_2",
        "norm",
        "head",
    ]
    whole = network(some_tokens())
    for cut in range(1, len(children)):
        first, second = (
            nn.Sequential(OrderedDict(part)) for part in (children[:cut], children[cut:])
        )
        assert torch.equal(second(first(some_tokens())), whole)


def test_it_is_the_papers_formula() -> None:
    network = small().double()
    p = dict(network.named_parameters())
    with torch.no_grad():
        for parameter in p.values():  # biases and all that begins small, too
            parameter.add_(0.3 * torch.randn_like(parameter))
    tokens = some_tokens(2, 7)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        centered = x - x.mean(-1, keepdim=True)
        scaled = centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return scaled * p[f"{name}.weight"] + p[f"{name}.bias"]

    x = p["embedding.token.weight"][tokens] + p["embedding.position.weight"][:7]
    future = torch.ones(7, 7, dtype=torch.bool).triu(1)
    for block in ("block_0", "block_1"):
        y = norm(x, f"{block}.attention_norm")
        query, key, value = (
            linear(y, f"{block}.attention.{name}") for name in ("query", "key", "value")
        )
        heads = []
        for q, k, v in zip(query.split(4, -1), key.split(4, -1), value.split(4, -1), strict=True):
            scores = (q @ k.transpose(1, 2) / math.sqrt(4)).masked_fill(future, -math.inf)
            heads.append(scores.softmax(-1) @ v)
        x = x + linear(torch.cat(heads, -1), f"{block}.attention.output")
        y = linear(norm(x, f"{block}.feed_forward_norm"), f"{block}.feed_forward.expand")
        y = y * (1 + torch.erf(y / math.sqrt(2))) / 2
        x = x + linear(y, f"{block}.feed_forward.contract")
    wanted = linear(norm(x, "norm"), "head")
    assert torch.allclose(network(tokens), wanted, atol=1e-10)


def test_nothing_comes_from_the_future() -> None:
    network = small()
    tokens = some_tokens()
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 23
    before, after = network(tokens), network(changed)
    assert torch.allclose(before[:, :5], after[:, :5], atol=1e-6)
    assert ((before - after)[:, 5:].abs().amax(-1) > 1e-6).all()
    assert torch.allclose(network(tokens[:, :4]), before[:, :4], atol=1e-6)


def test_heads_may_be_dealt_to_several_processes() -> None:
    torch.manual_seed(0)
    whole = Attention(12, 6).double()
    values = torch.randn(2, 5, 12, dtype=torch.float64)
    parts = []
    for rows in (slice(0, 4), slice(4, 12)):  # two heads here, four there
        part = Attention(12, 6).double()
        for name in ("query", "key", "value"):
            layer, source = getattr(part, name), getattr(whole, name)
            layer.weight = nn.Parameter(source.weight[rows])
            layer.bias = nn.Parameter(source.bias[rows])
        part.output.weight = nn.Parameter(whole.output.weight[:, rows])
        part.output.bias = nn.Parameter(torch.zeros(12, dtype=torch.float64))
        parts.append(part(values))
    assert torch.allclose(parts[0] + parts[1] + whole.output.bias, whole(values), atol=1e-12)


def test_initial_values() -> None:
    network = small(vocabulary=500, width=96, layers=8, context=64)
    for name, parameter in network.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            into_residual = name.endswith(("output.weight", "contract.weight"))
            deviation = 0.02 / 4 if into_residual else 0.02
            assert parameter.std().item() == pytest.approx(deviation, rel=0.05), name
    tokens = torch.randint(500, (8, 64))
    loss = F.cross_entropy(network(tokens).flatten(0, 1), tokens.flatten())
    assert loss.item() == pytest.approx(math.log(500), rel=0.05)


def test_dropout_is_for_training() -> None:
    network = small(dropout=0.5)
    assert not torch.equal(network(some_tokens()), network(some_tokens()))
    network.eval()
    assert torch.equal(network(some_tokens()), small().eval()(some_tokens()))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"heads=5.*a multiple of the heads"):
        small(heads=5)
    with pytest.raises(ValueError, match=r"layers=0.*start at 1"):
        small(layers=0)
    with pytest.raises(ValueError, match="sequences of 10 tokens: the context is 9"):
        small()(some_tokens(1, 10))


def test_it_learns_to_copy_from_before() -> None:
    """Three random tokens, again and again: what comes next stands three places back."""
    network = small(vocabulary=6, width=16, heads=2)
    generator = torch.Generator().manual_seed(2)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)

    def loss_of(rows: int) -> torch.Tensor:
        text = torch.randint(6, (rows, 3), generator=generator).repeat(1, 3)
        logits = network(text[:, :-1])[:, 2:]
        return F.cross_entropy(logits.flatten(0, 1), text[:, 3:].flatten())

    for _ in range(150):
        optimizer.zero_grad()
        loss_of(32).backward()
        optimizer.step()
    assert loss_of(500).item() < 0.1 < math.log(6)
