"""What workers leave for each other at server 0, by topic."""

from __future__ import annotations

import torch

__all__ = ["SharedTopics"]

_MOST_TOPICS = 4096


class SharedTopics:
    """Bytes that workers leave for each other: under each topic, the last of each worker."""

    def __init__(self) -> None:
        self._left: dict[str, dict[int, torch.Tensor]] = {}

    def put(self, topic: str, worker: int, payload: torch.Tensor) -> None:
        """Keeps what a worker leaves.

        Raises:
            ValueError: that would be a topic too many.
        """
        if topic not in self._left and len(self._left) >= _MOST_TOPICS:
            raise ValueError(f"workers share {_MOST_TOPICS} topics")
        self._left.setdefault(topic, {})[worker] = payload

    def left(self, topic: str) -> list[tuple[int, torch.Tensor]]:
        """Returns what workers have left under a topic, by worker."""
        return sorted(self._left.get(topic, {}).items())
