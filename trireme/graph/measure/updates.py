"""What an optimizer needs for a parameter: memory for its state, and time for its step."""

from __future__ import annotations

import inspect
import statistics
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from trireme.graph.measure.trial import timed

_SMALL, _LARGE = 4, 1 << 18
"""Elements of the tensors with which updates are measured, several at a time."""
_COUNT = 4


@dataclass(frozen=True)
class UpdateCost:
    """How long an optimizer's step takes for a parameter."""

    tensor_seconds: float = 0.0  # for each parameter, whatever its size
    byte_seconds: float = 0.0  # for each of its bytes

    def seconds(self, size: int) -> float:
        """Returns the duration for a parameter of that many bytes."""
        return self.tensor_seconds + size * self.byte_seconds


NO_UPDATE = UpdateCost()
"""That of no optimizer."""


def state_factor(optimizer: torch.optim.Optimizer) -> float:
    """Returns how many bytes of state an optimizer has for each byte of a parameter.

    An optimizer of the same class and hyper-parameters makes a step on a small tensor.
    """
    parameter = torch.zeros(64, 64)
    another = _stepped(optimizer, parameter)
    tensors = [each for each in tree_leaves(dict(another.state)) if isinstance(each, torch.Tensor)]
    # A count of steps is as large for any parameter.
    sizes = [each.nbytes for each in tensors if each.dim() > 0 and each is not parameter]
    return sum(sizes) / parameter.nbytes


def update_cost(optimizer: torch.optim.Optimizer, repeats: int = 10) -> UpdateCost:
    """Measures how long an optimizer's step takes, on tensors of two sizes."""
    seconds = []
    for elements in (_SMALL, _LARGE):
        parameters = [torch.zeros(elements) for _ in range(_COUNT)]
        another = _stepped(optimizer, *parameters)
        took = [timed(lambda: another.step(_closure))[0] for _ in range(repeats)]  # noqa: B023
        seconds.append(statistics.median(took) / _COUNT)
    small, large = seconds
    return UpdateCost(small, max(large - small, 0.0) / (_LARGE * 4))


def _stepped(optimizer: torch.optim.Optimizer, *parameters: torch.Tensor) -> torch.optim.Optimizer:
    """Returns an optimizer of the same kind that has made a step."""
    kind: Any = type(optimizer)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.1)
    known = inspect.signature(kind).parameters
    named = optimizer.defaults | optimizer.param_groups[0]
    options = {name: value for name, value in named.items() if name in known and name != "params"}
    another: torch.optim.Optimizer = kind(list(parameters), **options)
    another.step(_closure)
    return another


def _closure() -> float:
    return 0.0
