"""The number of GPUs of this host."""

from __future__ import annotations

__all__ = ["visible_gpus"]


def visible_gpus() -> int:
    """Returns how many GPUs PyTorch finds here; `CUDA_VISIBLE_DEVICES` limits them."""
    import torch  # takes seconds, and only `--workers auto` needs it

    return torch.cuda.device_count()
