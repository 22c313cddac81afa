"""What this process holds of a tensor, and which modules of a model a program calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

__all__ = ["called", "is_shared", "local"]


def is_shared(tensor: torch.Tensor) -> TypeIs[DTensor]:
    """Returns whether several processes hold a tensor together."""
    # By what it can do: to import DTensor takes a second, and most programs never meet one.
    return hasattr(tensor, "to_local")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the part of a tensor that this process holds: all of it, or a shard's memory."""
    return tensor.to_local() if is_shared(tensor) else tensor


def called(module: nn.Module) -> list[nn.Module]:
    """Returns the modules that a program calls: this one, or what a container of several holds."""
    if type(module).forward is not nn.Module.forward:
        return [module]
    return [each for child in module.children() for each in called(child)]
