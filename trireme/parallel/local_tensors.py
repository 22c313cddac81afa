"""The local shard of a distributed tensor, and the modules of a model that a program calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

__all__ = ["called_modules", "is_dtensor", "to_local"]


def is_dtensor(tensor: torch.Tensor) -> TypeIs[DTensor]:
    """Returns whether a tensor is a `DTensor`, of which each process holds a part."""
    # Checked by attribute: importing DTensor takes a second, and most programs do not use it.
    return hasattr(tensor, "to_local")


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the part of a tensor that this process holds: the tensor itself, or its shard."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def called_modules(module: nn.Module) -> list[nn.Module]:
    """Returns the modules that a program calls: the module, or the children of a container."""
    if type(module).forward is not nn.Module.forward:
        return [module]
    return [each for child in module.children() for each in called_modules(child)]
