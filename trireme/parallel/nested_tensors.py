"""Maps the tensors in nested structures, such as batches and model outputs.

The structures are tuples, named tuples, lists, dicts and their subclasses (such as the outputs of
Hugging Face's models, which are dicts and dataclasses at once), and dataclasses. Each is rebuilt as
an object of its own class. Any other object is passed on unchanged.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from trireme.errors import ConfigurationError

__all__ = ["map_tensors", "tensors_in"]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors of a structure, in its order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif _is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Returns a structure like another, with each tensor replaced by what a function makes of it.

    Args:
        value: a tensor, or tensors in tuples, lists, mappings and dataclasses, of any class.
        function: of one tensor.

    Returns:
        An object of the same class, made without calling its constructor where that may want
        something else. The given one is not changed.

    Raises:
        ConfigurationError: objects of a class cannot be made anew; names it.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    items: Any
    if isinstance(value, Mapping):
        items = {key: map_tensors(item, function) for key, item in value.items()}
    elif isinstance(value, (tuple, list)):
        items = [map_tensors(item, function) for item in value]
    elif _is_dataclass(value):
        fields = [field.name for field in dataclasses.fields(value)]
        items = {name: map_tensors(getattr(value, name), function) for name in fields}
    else:
        return value
    try:
        return _made_anew(value, items)
    except Exception as error:
        raise ConfigurationError(
            f"a {type(value).__qualname__} that a batch or a model's outputs hold cannot be made "
            f"anew with other tensors ({type(error).__name__}: {error}): use a dict, a named tuple "
            "or a dataclass"
        ) from error


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _made_anew(value: Any, items: Any) -> Any:
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
        made[:] = items
        return made
    if isinstance(value, tuple):
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    made = copy.copy(value)
    for name, item in items.items():
        if item is not getattr(value, name):
            object.__setattr__(made, name, item)  # a frozen one too
    return made
