"""Whether a batch may be computed in micro-batches: whether its loss stays the same."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from trireme.graph.rehearsal import restored
from trireme.session.replica.batch import arguments, examples_in, pieces
from trireme.session.replica.replica import Loss, scalar

_CLOSE = 1e-5
"""By how much the losses may differ, relative to the batch's: as rounding in float32 does."""


def divides(model: nn.Module, loss: Loss, batch: tuple[Any, Any], count: int) -> bool:
    """Returns whether the mean loss of micro-batches, weighted by examples, is that of the batch.

    It is not where the loss is no mean over the examples (targets that are ignored, weights of
    classes, losses within the batch), or where layers look at the whole batch. The model is in
    evaluation mode meanwhile, as dropout draws other numbers for micro-batches, and keeps its
    state.

    Args:
        model: the whole model.
        loss: see `Loss`.
        batch: inputs and targets.
        count: the number of micro-batches.
    """

    def mean(piece: tuple[Any, Any]) -> float:
        inputs, targets = piece
        args, kwargs = arguments(inputs)
        return float(scalar(loss(model(*args, **kwargs), targets)))

    modes = [(module, module.training) for module in model.modules()]
    examples = examples_in(batch)
    with restored(model), torch.no_grad():
        model.eval()
        try:
            whole = mean(batch)
            parts = sum(mean(piece) * size / examples for piece, size in pieces(batch, count))
        finally:
            for module, training in modes:
                module.training = training
    return math.isclose(whole, parts, rel_tol=_CLOSE, abs_tol=_CLOSE)
