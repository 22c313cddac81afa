"""How much the mean over a batch counts in a mean over several batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trireme.errors import ConfigurationError

Weight = Callable[[Any, Any], Any]
"""(batch, outputs) -> the number that the batch's mean loss is the mean of, such as of tokens."""

_IGNORED = -100
"""The label that PyTorch's and Transformers' losses leave out."""


def counted_labels(model: nn.Module, labels: Any) -> int | None:
    """Returns the number of labels that a model's own loss is the mean of.

    A causal model of Transformers predicts each label from what comes before it, so that the first
    one of each row does not count.
    """
    whole = isinstance(labels, torch.Tensor) and labels.dim() and not labels.is_floating_point()
    if not whole:
        return None
    if labels.dim() > 1 and getattr(model, "loss_type", None) == "ForCausalLM":
        labels = labels[..., 1:]
    return int((labels != _IGNORED).sum())


def weight_of(weight: Weight, batch: Any, outputs: Any) -> float:
    """Returns the weight of a batch by the program's function."""
    try:
        number = float(weight(batch, outputs))
    except (AttributeError, TypeError) as error:
        if outputs is not None:
            raise
        raise ConfigurationError(
            "weight=: with accumulate, and in a graph, a batch is weighed before its outputs are "
            "known, and the function is called with None for them: weigh by the batch alone "
            f"({error})"
        ) from error
    if not (math.isfinite(number) and number >= 0):
        raise ConfigurationError(f"weight= returned {number}: it must be finite, and 0 or more")
    return number
