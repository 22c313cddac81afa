"""Clocks. Code that waits or expires takes a `Clock`, so that a test can give it another one."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A clock that never goes backwards. Only differences of two readings have a meaning."""

    def now(self) -> float:
        """Returns the time in seconds."""


class MonotonicClock:
    """The machine's monotonic clock."""

    now = staticmethod(time.monotonic)
