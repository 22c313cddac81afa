"""Clocks. Code that waits or expires takes a `Clock`, so that a test can give it another one."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Protocol


class Clock(Protocol):
    """A clock that never goes backwards. Only differences of two readings have a meaning."""

    def now(self) -> float:
        """Returns the time in seconds."""


class MonotonicClock:
    """The machine's monotonic clock."""

    now = staticmethod(time.monotonic)


def clock_name() -> str:
    """Returns a name for the clock of `time.monotonic`. The same name means the same clock.

    On Linux all processes since the machine was started share one clock. On other systems each
    process counts as having its own.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return f"{socket.gethostname()}/{os.getpid()}"
    return f"boot/{boot}"
