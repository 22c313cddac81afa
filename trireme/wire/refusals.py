"""Says that connections were refused, but no more often than people can read.

Anybody who reaches a port can have a connection refused thousands of times a second. Each of them
is counted; of those that come faster than a few a minute only the number is said.
"""

from __future__ import annotations

import logging

__all__ = ["BURST", "LINE_SECONDS", "Refusals"]

_log = logging.getLogger(__name__)

BURST = 20
"""So many lines are written one after the other, after a quiet time."""

LINE_SECONDS = 10.0
"""From then on one line in so many seconds."""


class Refusals:
    """The refused connections of one service.

    Attributes:
        count: how many there were.
    """

    def __init__(self) -> None:
        self.count = 0
        self._unsaid = 0
        self._lines = float(BURST)  # that may be written now
        self._since: float | None = None

    def say(self, now: float, reason: str) -> None:
        """Notes a refused connection, and says why if that is not too often.

        Args:
            now: the time in seconds.
            reason: who was refused, and why.
        """
        self.count += 1
        if self._may_write(now):
            _log.warning("%s", reason)
        else:
            self._unsaid += 1

    def tick(self, now: float) -> None:
        """Says how many connections were refused that nothing was said of."""
        if self._unsaid and self._may_write(now):
            _log.warning(
                "%d more connections were refused, %d in all: somebody tries again and again",
                self._unsaid,
                self.count,
            )
            self._unsaid = 0

    def _may_write(self, now: float) -> bool:
        passed = 0.0 if self._since is None else now - self._since
        self._since = now
        self._lines = min(float(BURST), self._lines + passed / LINE_SECONDS)
        if self._lines < 1.0:
            return False
        self._lines -= 1.0
        return True
