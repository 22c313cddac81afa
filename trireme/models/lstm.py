"""A recurrent language model: the one of the classic TensorFlow Penn Treebank tutorial."""

from __future__ import annotations

from collections import OrderedDict
from typing import Self

import torch
from torch import nn

__all__ = ["LSTMLanguageModel", "LSTMLayer"]

_BOUND = 0.1


class LSTMLanguageModel(nn.Sequential):
    """Predicts the next token: embedding, layers of LSTM, head.

    Zaremba, Sutskever, Vinyals: Recurrent neural network regularization, 2014, section 3: dropout
    is between layers, never from one time to the next. The children are `embedding`, `dropout`,
    `lstm_0`, `lstm_1` and so on, and `head`, one after the other.

    Takes int64 tokens of shape (N, time) and returns logits of shape (N, time, vocabulary).

    With `carry` each layer begins where it ended the batch before, row by row, and gradients go
    back to the batch's beginning: truncated back-propagation through time. Then consecutive
    batches must be consecutive text, as `trireme.data.text.TextWindows` provides it; call
    `reset_state()` before other batches. Training and evaluation carry their own states; each
    evaluation begins with none. States are in no checkpoint, and a batch that is computed in pieces
    (a session's `accumulate`) has several in turn: do not carry there.
    """

    def __init__(
        self,
        vocabulary: int,
        width: int,
        layers: int,
        dropout: float = 0.0,
        *,
        carry: bool = False,
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
                nn.init.uniform_(parameter, -_BOUND, _BOUND)
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
