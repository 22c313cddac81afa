"""Takes batches apart, and weighs them: tensors in tuples, lists, mappings and dataclasses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from trireme.data.batch import Batch
from trireme.errors import ConfigurationError
from trireme.tensors import map_tensors, tensors_in

_TARGETS = ("targets", "target", "labels", "label")
_IGNORED = -100  # the label that PyTorch's and Transformers' losses leave out


def inputs_and_targets(batch: Any, *, keep_targets: bool = False) -> tuple[Any, Any]:
    """Returns the inputs of the model, and the targets for the loss.

    A pair is inputs and targets; of a longer tuple the last item is the targets; of a mapping, the
    entry `targets`, `target`, `labels` or `label`. Any other object is both.
    """
    batch = batch.data if isinstance(batch, Batch) else batch
    if isinstance(batch, (tuple, list, Mapping)) and not batch:
        raise ConfigurationError("a batch is empty: give inputs and targets")
    if isinstance(batch, Mapping):
        for name in _TARGETS:
            if name in batch:
                inputs = {key: value for key, value in batch.items() if key != name}
                return batch if keep_targets else inputs, batch[name]
        return batch, batch
    if isinstance(batch, (tuple, list)):
        items = tuple(batch)
        if len(items) == 1:
            return items[0], items[0]
        if keep_targets:
            return items, items[-1]
        return items[0] if len(items) == 2 else items[:-1], items[-1]
    return batch, batch


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments with which a model is called: positional, and by name."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def examples_in(value: Any) -> int:
    """Returns the length of the first dimension of the first tensor."""
    for tensor in tensors_in(value):
        if tensor.dim():
            return int(tensor.shape[0])
    raise ConfigurationError(
        f"a batch of {type(value).__name__} holds no tensor with a batch dimension: give tensors "
        "whose first dimension counts the examples"
    )


def examples_of(inputs: Any, targets: Any) -> int:
    """Returns the number of examples of a batch.

    It is the first dimension of the inputs' tensors. Where they differ in it, as all ids of a batch
    do from the offsets of its bags, it is that of the targets.
    """
    sizes = {tensor.shape[0] for tensor in tensors_in(inputs) if tensor.dim()}
    if len(sizes) > 1 and isinstance(targets, torch.Tensor) and targets.dim():
        return int(targets.shape[0])
    return examples_in(inputs)


def move(value: Any, device: torch.device) -> Any:
    """Returns the value with its tensors on a device; tensors that are there are not copied."""
    return map_tensors(
        value, lambda tensor: tensor.to(device, non_blocking=True) if tensor.dim() else tensor
    )


def pieces(value: Any, count: int, examples: int | None = None) -> Iterator[tuple[Any, int]]:
    """Splits a batch into at most `count` pieces of nearly equal size; yields them with sizes."""
    total = examples_in(value) if examples is None else examples
    edges = [total * i // count for i in range(count + 1)]

    def cut(low: int, high: int, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[low:high] if tensor.dim() and tensor.shape[0] == total else tensor

    for low, high in pairwise(edges):
        if high > low:
            yield map_tensors(value, partial(cut, low, high)), high - low


def counted_labels(model: nn.Module, labels: Any) -> int | None:
    """Returns the number of labels that a model's own loss is the mean of.

    In a causal model of Transformers the first one of each row has nothing before it.
    """
    whole = isinstance(labels, torch.Tensor) and labels.dim() and not labels.is_floating_point()
    if not whole:
        return None
    if labels.dim() > 1 and getattr(model, "loss_type", None) == "ForCausalLM":
        labels = labels[..., 1:]
    return int((labels != _IGNORED).sum())


def weight_of(weight: Callable[[Any, Any], Any], batch: Any, outputs: Any) -> float:
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
