"""The memory that this process holds of a tensor, which may be a shard of it."""

from __future__ import annotations

import torch

__all__ = ["local"]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the part of a tensor that this process holds: all of it, or a shard's memory."""
    # By what it can do: to import DTensor takes a second, and most programs never meet one.
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()
