"""Whether a program's own loop has changed gradients since backward made them."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

import torch
from torch import nn

_OWN = str(Path(__file__).parents[1])
_LIBRARIES = tuple({*sysconfig.get_paths().values(), str(Path(torch.__file__).parent)})


class GradientWatch:
    """Notes each gradient as backward leaves it, to tell whether the loop has written to it since.

    `clip_grad_norm_`, `clip_grad_value_` and `GradScaler.unscale_` write to gradients in place,
    which autograd counts as versions of a tensor.

    Args:
        parameters: the parameters whose gradients are noted.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._noted: dict[nn.Parameter, tuple[int, int]] = {}  # and keeps no gradient alive
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]
            for parameter in parameters
            if parameter.requires_grad
        ]

    def _note(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter) and parameter.grad is not None
        self._noted[parameter] = id(parameter.grad), parameter.grad._version

    def changed(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Returns whether a gradient is not what backward has left."""
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
        """Notes no more gradients."""
        for handle in self._handles:
            handle.remove()
        self._noted.clear()


def line_of_program() -> str:
    """Returns the line of the program that runs now, such as `train.py:41`; "" for none.

    The lines of libraries are left out, where there is another.
    """
    frame: FrameType | None = sys._getframe(1)
    first = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_OWN, "<")):
            place = f"{Path(name).name}:{frame.f_lineno}"
            if not name.startswith(_LIBRARIES):
                return place
            first = first or place
        frame = frame.f_back
    return first
