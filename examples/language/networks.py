"""Networks that predict the next token of a text."""

from __future__ import annotations

from collections import OrderedDict
from typing import Self

import torch
from torch import nn
from torch.nn import functional as F

_LSTM_BOUND = 0.1
_TRANSFORMER_DEVIATION = 0.02


class LSTMLanguageModel(nn.Sequential):
    """Predicts the next token: embedding, layers of LSTM, head.

    Zaremba, Sutskever, Vinyals: Recurrent neural network regularization, 2014, section 3: dropout
    is between layers, never from one time to the next. The children are `embedding`, `dropout`,
    `lstm_0`, `lstm_1` and so on, and `head`, one after the other.

    Takes int64 tokens of shape (N, time) and returns logits of shape (N, time, vocabulary).

    With `carry` each layer begins where it ended the batch before, row by row, and gradients go
    back to the batch's beginning: truncated back-propagation through time. Then consecutive
    batches must be consecutive text, as `language.text.TextWindows` provides it; call
    `reset_state()` before other batches. Training and evaluation carry their own states; each
    evaluation begins with none. States are in no checkpoint, and a batch that is computed in pieces
    (a session's `accumulate`) has several in turn: do not carry there.
    """

    def __init__(
        self, vocabulary: int, width: int, layers: int, dropout: float = 0.0, *, carry: bool = False
    ) -> None:
        """Makes the network: weights uniform in [-0.1, 0.1], biases of zero.

        Args:
            vocabulary: the number of tokens.
            width: the width of the embedding and of each layer.
            layers: the number of LSTM layers.
            dropout: the probability of dropout, after the embedding and each layer.
            carry: whether each batch begins with the state that the batch before it left.

        Raises:
            ValueError: a number is below 1.
        """
        if min(vocabulary, width, layers) < 1:
            raise ValueError(
                f"LSTMLanguageModel({vocabulary=}, {width=}, {layers=}): all start at 1"
            )
        children: OrderedDict[str, nn.Module] = OrderedDict(
            embedding=nn.Embedding(vocabulary, width), dropout=nn.Dropout(dropout)
        )
        for number in range(layers):
            children[f"lstm_{number}"] = LSTMLayer(width, dropout, carry=carry)
        children["head"] = nn.Linear(width, vocabulary)
        super().__init__(children)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.uniform_(parameter, -_LSTM_BOUND, _LSTM_BOUND)
            else:
                nn.init.zeros_(parameter)

    def reset_state(self) -> None:
        """Resets the state to zero, for a batch that does not continue the last one."""
        for layer in self.children():
            if isinstance(layer, LSTMLayer):
                layer.reset_state()


class LSTMLayer(nn.Module):
    """One LSTM layer that keeps its own state. Takes and returns (N, time, width).

    Attributes:
        carry: whether a batch begins with the state that the batch before it left, instead of zero.
    """

    def __init__(self, width: int, dropout: float = 0.0, *, carry: bool = False) -> None:
        super().__init__()
        self.carry = carry
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        # The states of training and of evaluation, by `self.training`. They are not buffers, which
        # workers share and checkpoints hold: each worker reads a text of its own.
        self._states: dict[bool, tuple[torch.Tensor, torch.Tensor]] = {}

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the outputs at all times.

        Raises:
            ValueError: the carried state has another number of rows.
        """
        state = self._states.get(self.training)
        if state is not None and state[0].shape[1] != len(values):
            raise ValueError(
                f"a batch of {len(values)} rows cannot go on where one of {state[0].shape[1]} "
                "ended: feed as many rows each time, or say reset_state() before"
            )
        outputs, (hidden, cell) = self.lstm(values, state)
        if self.carry:
            self._states[self.training] = hidden.detach(), cell.detach()
        dropped: torch.Tensor = self.dropout(outputs)
        return dropped

    def reset_state(self) -> None:
        """Resets the states of training and of evaluation to zero."""
        self._states.clear()

    def train(self, mode: bool = True) -> Self:
        """Sets training or evaluation mode; an evaluation begins with a state of zero."""
        if not mode:
            self._states.pop(False, None)
        return super().train(mode)


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
                nn.init.normal_(parameter, std=_TRANSFORMER_DEVIATION * (2 * layers) ** -0.5)


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
        nn.init.normal_(module.weight, std=_TRANSFORMER_DEVIATION)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
