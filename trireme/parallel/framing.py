"""Bytes as tensors of sizes that all know beforehand: short messages take one operation."""

from __future__ import annotations

import torch

__all__ = ["INLINE", "content", "framed", "size_in"]

INLINE = 248
"""So many bytes of a message lie in its head."""

_SIZE = 8


def framed(data: bytes) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a message as two CPU tensors of bytes.

    Returns:
        A head of fixed size, with the number of bytes and the first of them; and the rest.
    """
    head = len(data).to_bytes(_SIZE, "little") + data[:INLINE].ljust(INLINE, b"\0")
    return _tensor(head), _tensor(data[INLINE:])


def size_in(head: torch.Tensor) -> int:
    """Returns how many bytes the message has that begins with a head."""
    return int.from_bytes(head[:_SIZE].numpy().tobytes(), "little")


def content(head: torch.Tensor, rest: torch.Tensor) -> bytes:
    """Returns the bytes that `framed` was given."""
    inline = min(size_in(head), INLINE)
    return head[_SIZE : _SIZE + inline].numpy().tobytes() + rest.numpy().tobytes()


def _tensor(data: bytes) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
