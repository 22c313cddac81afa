"""Logs refused connections at a limited rate.

Anybody who reaches a port can have thousands of connections refused each second. All of them are
counted. When they exceed a few a minute, only their number is logged.
"""

from __future__ import annotations

import logging

__all__ = ["BURST", "LINE_SECONDS", "Refusals"]

_log = logging.getLogger(__name__)

BURST = 20
"""The number of lines that may be logged at once after a quiet time."""

LINE_SECONDS = 10.0
"""After that, one line may be logged in so many seconds."""


class Refusals:
    """The refused connections of one service.

    Attributes:
        count: how many connections were refused.
    """

    def __init__(self) -> None:
        self.count = 0
        self._unlogged = 0
        self._lines = float(BURST)  # how many lines may be logged now
        self._since: float | None = None

    def log(self, now: float, reason: str) -> None:
        """Counts a refused connection, and logs it if the rate allows.

        Args:
            now: the time in seconds.
            reason: which peer was refused, and why.
        """
        self.count += 1
        if self._may_write(now):
            _log.warning("%s", reason)
        else:
            self._unlogged += 1

    def tick(self, now: float) -> None:
        """Logs how many refused connections were not logged, if the rate allows."""
        if self._unlogged and self._may_write(now):
            _log.warning(
                "%d more connections were refused, %d in all: somebody tries again and again",
                self._unlogged,
                self.count,
            )
            self._unlogged = 0

    def _may_write(self, now: float) -> bool:
        passed = 0.0 if self._since is None else now - self._since
        self._since = now
        self._lines = min(float(BURST), self._lines + passed / LINE_SECONDS)
        if self._lines < 1.0:
            return False
        self._lines -= 1.0
        return True
