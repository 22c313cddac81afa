"""Whether a program's own loop has written to gradients since backward made them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from trireme.tensors import to_local


class GradientWatch:
    """Notes each gradient as backward leaves it, to tell whether the loop has written to it since.

    What writes in place, such as `clip_grad_norm_`, autograd counts as versions of a tensor; but
    not what `GradScaler` does, at each step: in the first ones some values are compared too.
    """

    _compared = 3  # steps, from the first on

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._noted: dict[torch.Tensor, tuple[int, int]] = {}  # and keeps no gradient alive
        self._values: dict[torch.Tensor, str] = {}
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]
            for parameter in parameters
            if parameter.requires_grad
        ]

    def _note(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self._noted[parameter] = id(parameter.grad), parameter.grad._version
        if self._compared:
            self._values[parameter] = _some(parameter.grad)

    def written(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Returns, at a step, whether a gradient is not as backward has left it."""
        values, self._values, self._compared = self._values, {}, max(0, self._compared - 1)
        for parameter in parameters:
            noted, gradient = self._noted.get(parameter), parameter.grad
            if noted is not None and gradient is not None:
                changed = parameter in values and values[parameter] != _some(gradient)
                if changed or noted != (id(gradient), gradient._version):
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


def _some(gradient: torch.Tensor) -> str:
    if gradient.layout is not torch.strided:
        return ""
    flat = to_local(gradient.detach()).reshape(-1)
    return str(flat[:: max(1, len(flat) // 64)].tolist())  # as text: NaN is itself there
