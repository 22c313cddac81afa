"""A clock for tests, which decide how time passes."""

from __future__ import annotations


class VirtualClock:
    """A clock that moves only when `advance` is called."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Moves the clock forward.

        Raises:
            ValueError: `seconds` is negative.
        """
        if seconds < 0:
            raise ValueError(f"time cannot go back by {-seconds} s")
        self._now += seconds
