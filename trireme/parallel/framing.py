"""Bytes as tensors whose sizes all processes know: a short message takes one operation."""

from __future__ import annotations

import torch

__all__ = ["INLINE", "content", "framed", "size_in"]

INLINE = 248
"""The number of bytes of a message that its head holds."""

_SIZE = 8


def framed(data: bytes) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a message as two CPU tensors of bytes.

    Returns:
        A head of fixed size, which holds the length and the first bytes; and the remaining bytes.
    """
    head = len(data).to_bytes(_SIZE, "little") + data[:INLINE].ljust(INLINE, b"\0")
    return _tensor(head), _tensor(data[INLINE:])


def size_in(head: torch.Tensor) -> int:
    """Returns the length of a message from its head, in bytes."""
    return int.from_bytes(head[:_SIZE].numpy().tobytes(), "little")


def content(head: torch.Tensor, rest: torch.Tensor) -> bytes:
    """Returns the message that `framed` has split."""
    inline = min(size_in(head), INLINE)
    return head[_SIZE : _SIZE + inline].numpy().tobytes() + rest.numpy().tobytes()


def _tensor(data: bytes) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
