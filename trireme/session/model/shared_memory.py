"""Refuses parameters that are views of one memory: training moves each to a place of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import combinations
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trireme.errors import ConfigurationError
from trireme.session.model.module_names import named_buffers, named_parameters
from trireme.tensors import is_dtensor


def check_shared_memory(model: nn.Module, trained: Iterable[nn.Parameter]) -> None:
    """Checks that no trained parameter has an element in common with another tensor of the model.

    Raises:
        ConfigurationError: one has; the message names both.
    """
    mine = {id(parameter) for parameter in trained}
    stored = defaultdict(list)
    parameters = (("parameter", *each) for each in named_parameters(model))
    buffers = (("buffer", *each) for each in named_buffers(model))
    for kind, name, tensor in (*parameters, *buffers):
        if not (is_lazy(tensor) or is_dtensor(tensor)) and tensor.layout is torch.strided:
            stored[tensor.device, tensor.untyped_storage().data_ptr()].append((kind, name, tensor))
    for held in stored.values():
        for (_, name, one), (kind, other_name, other) in combinations(held, 2):
            if (id(one) in mine or id(other) in mine) and one is not other and _meet(one, other):
                raise _refused(name, kind, other_name)


def _refused(name: str, kind: str, other: str) -> ConfigurationError:
    instead = "compute the buffer in forward, from the parameter"
    if kind == "parameter":
        instead = (
            "to tie them, use the same Parameter in both places; where one is another view, as of "
            "weight.t(), compute it in forward, from the other"
        )
    return ConfigurationError(
        f"parameter {name!r} and {kind} {other!r} are views of one memory, and training would part "
        f"them, as it keeps each parameter at a place of its own: {instead}"
    )


def _meet(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two tensors of one storage have an element in common."""
    (begin, end), (other_begin, other_end) = _extent(one), _extent(other)
    if begin >= other_end or other_begin >= end:
        return False
    size = one.element_size()
    if size != other.element_size() or (one.is_contiguous() and other.is_contiguous()):
        return True
    marks = torch.zeros(max(end, other_end) // size, dtype=torch.bool)
    marks.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(marks.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def _extent(tensor: torch.Tensor) -> tuple[Any, Any]:
    """Returns where in its storage a tensor begins and ends, in bytes; nothing for one of none."""
    size, begin = tensor.element_size(), tensor.storage_offset() * tensor.element_size()
    if tensor.is_meta or not tensor.numel():
        return begin, begin
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return begin, begin + size * (1 + sum([(length - 1) * step for length, step in steps]))
