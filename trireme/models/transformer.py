"""A small decoder-only transformer, as GPT-2."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["Attention", "Block", "Embedding", "FeedForward", "Transformer"]

_DEVIATION = 0.02


class Transformer(nn.Sequential):
    """Predicts the next token: embedding, blocks of attention and feed-forward, norm, head.

    Vaswani et al., Attention is all you need, 2017, with the norm before each part of a block and
    learned positions as in Radford et al., Language models are unsupervised multitask learners,
    2019, 2.3. The head's weights are its own.

    Its children are `embedding`, `block_0`, `block_1` and so on, `norm` and `head`, one after the
    other: `nn.Sequential`s of some each, made from `named_children()`, compute the same in turn.

    Takes int64 tokens of shape (N, time), time at most `context`, and returns logits of shape
    (N, time, vocabulary); those at time t depend on the tokens up to t alone.
    """

    def __init__(
        self,
        vocabulary: int,
        width: int,
        heads: int,
        layers: int,
        context: int,
        dropout: float = 0.0,
    ) -> None:
        """Makes the network, with normal weights as GPT-2 and biases of zero.

        Args:
            vocabulary: the number of tokens.
            width: the width of the embedding and of each block.
            heads: the number of heads of each attention.
            layers: the number of blocks.
            context: the largest length of a sequence.
            dropout: the probability of dropout, after the embedding and at the end of each
                attention and feed-forward.

        Raises:
            ValueError: a number is below 1, or `width` is no multiple of `heads`.
        """
        if min(vocabulary, width, heads, layers, context) < 1 or width % heads:
            raise ValueError(
                f"Transformer({vocabulary=}, {width=}, {heads=}, {layers=}, {context=}): all "
                "start at 1, and the width must be a multiple of the heads"
            )
        children: OrderedDict[str, nn.Module] = OrderedDict(
            embedding=Embedding(vocabulary, width, context, dropout)
        )
        for number in range(layers):
            children[f"block_{number}"] = Block(width, heads, dropout)
        children["norm"] = nn.LayerNorm(width)
        children["head"] = nn.Linear(width, vocabulary)
        super().__init__(children)
        self.apply(_initialize)
        # The residual path is a sum of 2 * layers terms: its variance must not grow with them.
        for name, parameter in self.named_parameters():
            if name.endswith(("output.weight", "contract.weight")):
                nn.init.normal_(parameter, std=_DEVIATION * (2 * layers) ** -0.5)


class Embedding(nn.Module):
    """A vector for each token plus one for each position."""

    def __init__(self, vocabulary: int, width: int, context: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.context = context
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns (N, time, width).

        Raises:
            ValueError: the sequences are longer than `context`.
        """
        time = tokens.shape[1]
        if time > self.context:
            raise ValueError(f"sequences of {time} tokens: the context is {self.context}")
        positions = torch.arange(time, device=tokens.device)
        embedded: torch.Tensor = self.dropout(self.token(tokens) + self.position(positions))
        return embedded


class Block(nn.Module):
    """Attention and feed-forward, each of the normalized values and added to them."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width, dropout)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the next values, in the same shape."""
        values = values + self.attention(self.attention_norm(values))
        values = values + self.feed_forward(self.feed_forward_norm(values))
        return values


class Attention(nn.Module):
    """Causal attention of several heads.

    The number of heads is derived from the output width of `query`. So tensor parallelism can split
    `query`, `key`, `value` and `output` over processes, each with some whole heads.

    Attributes:
        head_size: the width of one head.
    """

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.head_size = width // heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Returns, for each position, the attention over the positions up to it."""
        query, key, value = (
            self._by_head(layer(values)) for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        taken: torch.Tensor = self.dropout(self.output(mixed.transpose(1, 2).flatten(2)))
        return taken

    def _by_head(self, values: torch.Tensor) -> torch.Tensor:
        batch, time, _ = values.shape
        return values.view(batch, time, -1, self.head_size).transpose(1, 2)


class FeedForward(nn.Module):
    """Two linear layers, with four times the width between them."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the term that is added to the values, in the same shape."""
        added: torch.Tensor = self.dropout(self.contract(F.gelu(self.expand(values))))
        return added


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=_DEVIATION)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
