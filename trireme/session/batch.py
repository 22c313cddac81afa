"""Batches as users have them: tensors in tuples, lists and dicts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch

from trireme.data.loader import Batch
from trireme.errors import ConfigurationError

__all__ = ["examples_in", "inputs_and_targets", "move", "pieces"]


def inputs_and_targets(batch: Any) -> tuple[Any, Any]:
    """Returns what goes into the model and what the loss compares its outputs with.

    A pair is taken apart; of a longer tuple the last is the target; of a dict, `target`,
    `targets`, `label` or `labels`. Anything else is both.
    """
    if isinstance(batch, Batch):
        batch = batch.data
    if isinstance(batch, (tuple, list, dict)) and not batch:
        raise ConfigurationError("a batch is empty: give inputs and targets")
    if isinstance(batch, dict):
        for name in ("targets", "target", "labels", "label"):
            if name in batch:
                return {k: v for k, v in batch.items() if k != name}, batch[name]
        return batch, batch
    if isinstance(batch, (tuple, list)):
        items = tuple(batch)
        if len(items) == 2:
            return items[0], items[1]
        if len(items) > 2:
            return items[:-1], items[-1]
        return items[0], items[0]
    return batch, batch


def examples_in(value: Any) -> int:
    """Returns the length of the first dimension of the first tensor.

    Raises:
        ConfigurationError: there is no tensor with a dimension.
    """
    for tensor in _tensors(value):
        if tensor.dim():
            return int(tensor.shape[0])
    raise ConfigurationError(
        f"a batch of {type(value).__name__} holds no tensor with a batch dimension: give tensors "
        "whose first dimension counts the examples"
    )


def move(value: Any, device: torch.device) -> Any:
    """Returns the value with its tensors on a device; nothing is copied that is there already."""
    return _map(value, lambda tensor: tensor.to(device, non_blocking=True))


def pieces(value: Any, count: int) -> Iterator[tuple[Any, int]]:
    """Cuts a batch into at most `count` pieces of nearly equal size, each with its size."""
    total = examples_in(value)
    edges = [total * i // count for i in range(count + 1)]
    for low, high in pairwise(edges):
        if high > low:
            yield _map(value, lambda tensor, a=low, b=high: tensor[a:b]), high - low


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _map(value: Any, function: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value) if value.dim() else value
    if isinstance(value, dict):
        return {key: _map(item, function) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_map(item, function) for item in value)
    if isinstance(value, list):
        return [_map(item, function) for item in value]
    return value
