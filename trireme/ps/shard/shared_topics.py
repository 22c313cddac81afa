"""Bytes that workers share with each other at server 0, by topic."""

from __future__ import annotations

import torch

__all__ = ["SharedTopics"]

_MOST_TOPICS = 4096


class SharedTopics:
    """The shared bytes: under each topic, the last of each worker."""

    def __init__(self) -> None:
        self._left: dict[str, dict[int, torch.Tensor]] = {}

    def put(self, topic: str, worker: int, payload: torch.Tensor) -> None:
        """Keeps what a worker shares.

        Raises:
            ValueError: that would be a topic too many.
        """
        if topic not in self._left and len(self._left) >= _MOST_TOPICS:
            raise ValueError(f"workers share {_MOST_TOPICS} topics")
        self._left.setdefault(topic, {})[worker] = payload

    def left(self, topic: str) -> list[tuple[int, torch.Tensor]]:
        """Returns what workers have shared under a topic, by worker."""
        return sorted(self._left.get(topic, {}).items())
