"""What an optimizer needs for a parameter: memory for its state, and time for its step."""

from __future__ import annotations

import inspect
import statistics
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from trireme.graph.measure.trial import timed

_ELEMENTS = 1 << 18  # of the parameter whose update is measured


def state_factor(optimizer: torch.optim.Optimizer) -> float:
    """Returns how many bytes of state such an optimizer has for each byte of a parameter."""
    parameter = torch.zeros(64, 64)
    another = _stepped(optimizer, parameter)
    tensors = [each for each in tree_leaves(dict(another.state)) if isinstance(each, torch.Tensor)]
    # A count of steps is as large for any parameter.
    sizes = [each.nbytes for each in tensors if each.dim() > 0 and each is not parameter]
    return sum(sizes) / parameter.nbytes


def update_seconds(optimizer: torch.optim.Optimizer, repeats: int = 10) -> float:
    """Measures how long an optimizer's step takes for each byte of a large parameter."""
    parameter = torch.zeros(_ELEMENTS)
    another = _stepped(optimizer, parameter)
    took = [timed(lambda: another.step(_closure))[0] for _ in range(repeats)]
    return statistics.median(took) / parameter.nbytes


def _stepped(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> torch.optim.Optimizer:
    """Returns an optimizer of the same kind that has made a step."""
    kind: Any = type(optimizer)
    parameter.grad = torch.full_like(parameter, 0.1)
    known = inspect.signature(kind).parameters
    named = optimizer.defaults | optimizer.param_groups[0]
    options = {name: value for name, value in named.items() if name in known and name != "params"}
    another: torch.optim.Optimizer = kind([parameter], **options)
    another.step(_closure)
    return another


def _closure() -> float:
    return 0.0
