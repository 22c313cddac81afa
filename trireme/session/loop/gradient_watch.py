"""Whether a program's own loop has changed gradients since backward made them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from trireme.tensors import to_local

_MOST_COPIED = 1 << 20


class GradientWatch:
    """Notes each gradient as backward leaves it, to tell whether the loop has written to it since.

    `clip_grad_norm_`, `clip_grad_value_` and `GradScaler.unscale_` write to gradients in place,
    which autograd counts as versions of a tensor. A write may leave them as they are, such as
    clipping to a norm that they do not have: from the first one on, small gradients are copied too,
    and compared.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        parameters = list(parameters)
        self._parameters = parameters
        self._noted: dict[nn.Parameter, tuple[int, int]] = {}  # and keeps no gradient alive
        self._copied: set[nn.Parameter] = set()
        self._copies: dict[nn.Parameter, torch.Tensor] = {}
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]
            for parameter in parameters
            if parameter.requires_grad
        ]

    def _note(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter) and parameter.grad is not None
        self._noted[parameter] = id(parameter.grad), parameter.grad._version
        if parameter in self._copied:
            self._copies[parameter] = parameter.grad.detach().clone()

    def changed(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Returns whether a gradient is not what backward has left."""
        written = False
        for parameter in parameters:
            noted, gradient = self._noted.get(parameter), parameter.grad
            if noted and gradient is not None and noted != (id(gradient), gradient._version):
                written = True
                copy = self._copies.get(parameter)
                if copy is not None and _differ(copy, gradient):
                    return True
        if written and not self._copied:
            self._copied = _smallest(self._parameters)
        return False

    def moved(self, parameters: Iterable[nn.Parameter]) -> None:
        """Notes that Trireme itself has put gradients elsewhere."""
        for parameter in parameters:
            if parameter in self._noted and parameter.grad is not None:
                self._note(parameter)

    def forget(self, parameters: Iterable[nn.Parameter]) -> None:
        """Forgets gradients, after a step or where they were averaged."""
        for parameter in parameters:
            self._noted.pop(parameter, None)
            self._copies.pop(parameter, None)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._noted.clear()
        self._copies.clear()


def _differ(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Returns whether values differ, other than those that were NaN."""
    one, other = to_local(before), to_local(after.detach())
    return bool(((one != other) & (one == one)).any())


def _smallest(parameters: Iterable[nn.Parameter]) -> set[nn.Parameter]:
    """Returns the smallest parameters, with at most `_MOST_COPIED` elements together."""
    found: set[nn.Parameter] = set()
    left = _MOST_COPIED
    for parameter in sorted(parameters, key=torch.Tensor.numel):
        left -= parameter.numel()
        if found and left < 0:
            break
        found.add(parameter)
    return found
