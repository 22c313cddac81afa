"""How many GPUs there are for the processes of this host."""

from __future__ import annotations

__all__ = ["visible_gpus"]


def visible_gpus() -> int:
    """Returns how many GPUs PyTorch finds here; `CUDA_VISIBLE_DEVICES` counts."""
    import torch  # takes seconds, and only a launcher that was told to count needs it

    return torch.cuda.device_count()
