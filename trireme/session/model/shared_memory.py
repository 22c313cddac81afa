"""Refuses parameters that are views of one memory: training moves each to a place of its own."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trireme.errors import ConfigurationError
from trireme.session.model.module_names import named_buffers, named_parameters
from trireme.tensors import is_dtensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_shared_memory(model: nn.Module, trained: Iterable[nn.Parameter]) -> None:
    """Checks that no trained parameter has an element in common with another tensor of the model.

    Raises:
        ConfigurationError: one has; the message names both.
    """
    mine = {id(parameter) for parameter in trained}
    parameters = [(name, each, True) for name, each in named_parameters(model)]
    buffers = [(name, each, False) for name, each in named_buffers(model)]
    every = [*parameters, *buffers]
    held = [
        (str(each.device), *_extent(each), index, each)
        for index, (_, each, _) in enumerate(every)
        if _has_memory(each)
    ]
    held.sort(key=lambda each: each[:4])
    for place, (device, _, end, index, one) in enumerate(held):
        for other_device, begin, _, other_index, other in held[place + 1 :]:
            if other_device != device or begin >= end:
                break
            if (id(one) in mine or id(other) in mine) and one is not other and _overlap(one, other):
                first, second = sorted((index, other_index))
                raise _refused(every[first][0], every[second][0], tied=every[second][2])


def _refused(name: str, other: str, *, tied: bool) -> ConfigurationError:
    what, instead = "buffer", "compute the buffer in forward, from the parameter"
    if tied:
        what = "parameter"
        instead = (
            "to tie them, use the same Parameter in both places; where one is another view, as of "
            "weight.t(), compute it in forward, from the other"
        )
    return ConfigurationError(
        f"parameter {name!r} and {what} {other!r} are views of one memory, and training would part "
        f"them, as it keeps each parameter at a place of its own: {instead}"
    )


def _has_memory(tensor: torch.Tensor) -> bool:
    if is_lazy(tensor) or is_dtensor(tensor) or tensor.is_meta:
        return False
    return tensor.layout is torch.strided and tensor.numel() > 0


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two tensors whose memory overlaps have an element in common."""
    if one.is_contiguous() and other.is_contiguous():
        return True
    storage = one.untyped_storage()  # which is small beside what is trained, if not theirs alone
    marks = torch.zeros(-(-storage.nbytes() // 8) * 8, dtype=torch.uint8)
    _in(marks, one).fill_(1)
    return bool(_in(marks, other).any())


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns where in memory a tensor begins and ends, in bytes."""
    size, begin = tensor.element_size(), tensor.data_ptr()
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return begin, begin + size * (1 + sum((length - 1) * stride for length, stride in sizes))


def _in(marks: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Returns the view of other memory, of the same size, that a tensor is of its own."""
    step = min(tensor.element_size(), 8)
    like = marks.view(_INTEGERS[step])
    places = [stride * tensor.element_size() // step for stride in tensor.stride()]
    offset = tensor.storage_offset() * tensor.element_size() // step
    return like.as_strided(tensor.shape, places, offset)
