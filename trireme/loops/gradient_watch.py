"""Whether a program's own loop has written to gradients since backward made them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from trireme.loops import loop_data
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
        self._arrived: dict[torch.Tensor, str] = {}  # before the program's own hooks
        self._first: dict[torch.Tensor, RemovableHandle] = {}  # called before these
        self.hooked = False  # whether these change gradients
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]
            for parameter in parameters
            if parameter.requires_grad
        ]

    def _note(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None:  # a hook of the program has taken it away
            return
        self._noted[parameter] = id(parameter.grad), parameter.grad._version
        if self._compared:
            self._values[parameter] = _some(parameter.grad)
        arrived = self._arrived.pop(parameter, None)
        self.hooked |= arrived is not None and arrived != _some(parameter.grad)

    def written(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Returns, at a step, whether a gradient is not as backward has left it."""
        values, self._values, self._compared = self._values, {}, max(0, self._compared - 1)
        for parameter in parameters:
            if parameter._backward_hooks and parameter not in self._first and not self.hooked:
                self._look_before_hooks(parameter)
            noted, gradient = self._noted.get(parameter), parameter.grad
            if noted is not None and gradient is not None:
                changed = parameter in values and values[parameter] != _some(gradient)
                if changed or noted != (id(gradient), gradient._version):
                    return True
        return False

    def _look_before_hooks(self, parameter: nn.Parameter) -> None:
        hooks: dict[int, Any] = parameter._backward_hooks  # type: ignore[assignment]
        present = {**hooks}

        def arrive(gradient: torch.Tensor) -> None:
            ours = any(getattr(h, "__module__", "") == loop_data.__name__ for h in hooks.values())
            if parameter.grad is None and not ours:  # `.grad` then has this gradient alone
                self._arrived[parameter] = _some(gradient)

        hooks.clear()  # they are called in the order in which they came
        self._first[parameter] = parameter.register_hook(arrive)  # type: ignore[no-untyped-call]
        hooks.update(present)

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
        for handle in (*self._handles, *self._first.values()):
            handle.remove()
        self._noted.clear()
        self.hooked = False


def _some(gradient: torch.Tensor) -> str:
    if gradient.layout is not torch.strided:
        return ""
    flat = to_local(gradient.detach()).reshape(-1)
    return str(flat[:: max(1, len(flat) // 64)].tolist())  # as text: NaN is itself there
