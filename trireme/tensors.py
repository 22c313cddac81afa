"""Maps the tensors in nested structures; local shards of distributed tensors.

The structures are tuples, named tuples, lists, dicts and their subclasses (such as the outputs of
Hugging Face's models, which are dicts and dataclasses at once), and dataclasses. Each is rebuilt as
an object of its own class. Any other object is passed on unchanged.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from trireme.errors import ConfigurationError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

COLUMNS = 512  # the 64-bit words of a tensor's memory that are in a row, where `parities` are taken


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors of a structure, in its order."""
    if isinstance(value, torch.Tensor):
        yield value
    for item in (_items(value) or {}).values():
        yield from tensors_in(item)


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Returns a structure like another, with each tensor replaced by what a function makes of it.

    Returns:
        An object of the same class, made without calling its constructor where that may want
        something else. The given one is not changed.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    items = _items(value)
    if items is None:
        return value
    items = {key: map_tensors(item, function) for key, item in items.items()}
    try:
        return _made_anew(value, items)
    except Exception as error:
        raise ConfigurationError(
            f"a {type(value).__qualname__} that a batch or a model's outputs hold cannot be made "
            f"anew with other tensors ({type(error).__name__}: {error}): use a dict, a named tuple "
            "or a dataclass"
        ) from error


def joined(parts: Sequence[Any]) -> Any:
    """Returns a structure like the first, with the tensors of all joined by the first dimension.

    Tensors without dimensions are those of the first.
    """
    columns = zip(*(list(tensors_in(part)) for part in parts), strict=True)

    def join(tensor: torch.Tensor) -> torch.Tensor:
        column = next(columns)
        return torch.cat(column) if tensor.dim() else tensor

    return map_tensors(parts[0], join)


def _items(value: Any) -> dict[Any, Any] | None:
    """Returns what a structure holds, by key, index or field; None of what is no structure."""
    if isinstance(value, Mapping):
        return dict(value.items())
    if isinstance(value, (tuple, list)):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def _made_anew(value: Any, items: dict[Any, Any]) -> Any:
    """Returns a structure of the class of `value` that holds `items`."""
    if type(value) is dict:
        return items
    if isinstance(value, Mapping):
        # A copy of what keeps its items elsewhere, and does not say how to copy it, shares them.
        copies = isinstance(value, dict) or hasattr(value, "__copy__")
        if not isinstance(value, MutableMapping) or not copies:
            return type(value)(items)  # type: ignore[call-arg]
        made: Any = copy.copy(value)
        for key, item in items.items():
            if item is not value[key]:
                made[key] = item
        return made
    if isinstance(value, list):
        made = copy.copy(value)
        made[:] = items.values()
        return made
    if isinstance(value, tuple):
        make = getattr(value, "_make", type(value))
        return make(items.values())
    made = copy.copy(value)
    for name, item in items.items():
        if item is not getattr(value, name):
            object.__setattr__(made, name, item)  # a frozen one too
    return made


def digest(value: Any) -> bytes:
    """Returns 16 bytes that differ where the tensors of a structure differ, but by chance."""
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors_in(value):
        found.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
        found.update(bytes_of(tensor).data)
    return found.digest()


def parities(tensor: torch.Tensor) -> NDArray[np.uint64]:
    """Returns the exclusive ors of the columns of its words in rows, those of the rows, its size.

    The last row is filled with zeros. They take one pass at the speed of memory.
    """
    data = bytes_of(tensor)
    end = len(data) // (8 * COLUMNS) * (8 * COLUMNS)
    rest = np.zeros(8 * COLUMNS, np.uint8)
    rest[: len(data) - end] = data[end:]
    table, last = data[:end].view(np.uint64).reshape(-1, COLUMNS), rest.view(np.uint64)
    columns = np.bitwise_xor.reduce(table, axis=0) ^ last
    ends = np.array([np.bitwise_xor.reduce(last), len(data)], np.uint64)
    return np.concatenate((columns, np.bitwise_xor.reduce(table, axis=1), ends))


def bytes_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """Returns its bytes in their order: its own memory, or a copy of what lies otherwise."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data: NDArray[np.uint8] = flat.unsqueeze(-1).view(torch.uint8).reshape(-1).numpy()
    return data


def mean_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the mean of tensors of one type and shape; the first, if they are no real numbers.

    The mean of whole numbers, such as counters, would be none of theirs.
    """
    first = tensors[0]
    if not first.is_floating_point():
        return first
    return torch.stack([tensor.double() for tensor in tensors]).mean(0).to(first.dtype)


def is_dtensor(tensor: torch.Tensor) -> TypeIs[DTensor]:
    """Returns whether a tensor is a `DTensor`, of which each process holds a part."""
    # Checked by attribute: importing DTensor takes a second, and most programs do not use it.
    return hasattr(tensor, "to_local")


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the part of a tensor that this process holds: the tensor itself, or its shard."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the whole tensor on the CPU; every process that holds a part of it must call it."""
    full = tensor.full_tensor() if is_dtensor(tensor) else tensor
    return full.detach().cpu()


@torch.no_grad()
def fill_local(target: torch.Tensor, full: torch.Tensor) -> None:
    """Fills this process's part of `target` from the whole tensor."""
    if not is_dtensor(target):
        target.copy_(full)
        return
    from torch.distributed.tensor import distribute_tensor  # loads slowly

    full = full.to(device=target.device, dtype=target.dtype)
    placed = distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None)
    target.to_local().copy_(placed.to_local())


def local_part(parameter: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """Returns a copy of this process's part of an optimizer's state."""
    if full.shape != parameter.shape or not full.dim():
        return full.clone()
    part = torch.zeros_like(parameter.detach(), dtype=full.dtype)
    fill_local(part, full)
    return part
