"""Real and virtual time. Whatever waits or expires takes a `Clock`; tests move it by hand."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Protocol

__all__ = ["Clock", "MonotonicClock", "VirtualClock", "clock_name"]


class Clock(Protocol):
    """Seconds that never go backwards. Only differences between two readings mean anything."""

    def now(self) -> float:
        """Returns the time in seconds."""


class MonotonicClock:
    """The machine's monotonic clock."""

    now = staticmethod(time.monotonic)


def clock_name() -> str:
    """Returns which clock `time.monotonic` reads here: the same name is the same clock.

    On Linux all processes since the machine was started read one. Elsewhere each has its own, as
    far as this knows.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return f"{socket.gethostname()}/{os.getpid()}"
    return f"boot/{boot}"


class VirtualClock:
    """A clock that stands still until somebody moves it."""

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
