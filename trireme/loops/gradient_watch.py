"""Whether a program's own loop has written to gradients since backward made them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


class GradientWatch:
    """Notes each gradient as backward leaves it, to tell whether the loop has written to it since.

    What writes in place, such as `clip_grad_norm_`, autograd counts as versions of a tensor.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._noted: dict[torch.Tensor, tuple[int, int]] = {}  # and keeps no gradient alive
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]
            for parameter in parameters
            if parameter.requires_grad
        ]

    def _note(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self._noted[parameter] = id(parameter.grad), parameter.grad._version

    def written(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Returns whether a gradient is not as backward has left it."""
        for parameter in parameters:
            noted, gradient = self._noted.get(parameter), parameter.grad
            if noted and gradient is not None and noted != (id(gradient), gradient._version):
                return True
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

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._noted.clear()
