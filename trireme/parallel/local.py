"""What this process holds of a tensor, and which modules of a model a program calls."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["called", "local"]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the part of a tensor that this process holds: all of it, or a shard's memory."""
    # By what it can do: to import DTensor takes a second, and most programs never meet one.
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def called(module: nn.Module) -> list[nn.Module]:
    """Returns the modules that a program calls: this one, or what a container of several holds."""
    if type(module).forward is not nn.Module.forward:
        return [module]
    return [each for child in module.children() for each in called(child)]
