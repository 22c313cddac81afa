"""How who waits looks for what has not come, before going to sleep."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable

__all__ = ["Spin"]


class Spin:
    """Waits: looks again and again, then sleeps.

    Looking costs processor time, and being woken costs time. So who computes long between two waits
    may look long. What one thread waits for shares one of these: no wait is counted as computing.

    Args:
        least: seconds that one may always look.
        most: seconds that one never looks longer than.
        share: of the time since the last wait was over, between the two.
    """

    __slots__ = ("_least", "_most", "_over", "_share")

    def __init__(self, *, least: float, most: float, share: float = 0.0) -> None:
        self._least = least
        self._most = most
        self._share = share
        self._over = time.monotonic()  # the last wait

    def wait(self, poll: Callable[[int], object], seconds: float, *, look: bool = True) -> bool:
        """Waits until something is there; returns whether it is, within that time.

        Between two looks others may have the core.

        Args:
            poll: sleeps for at most so many milliseconds; says whether something is there.
            seconds: how long to wait in all.
            look: whether to look at all before sleeping.
        """
        now = time.monotonic()
        end, ready = now + seconds, False
        if look:
            share = self._share * (now - self._over)
            until = min(now + min(max(self._least, share), self._most), end)
            while not (ready := bool(poll(0))) and time.monotonic() < until:
                os.sched_yield()
        if not ready:
            ready = bool(poll(math.ceil(max(end - time.monotonic(), 0.0) * 1000)))
        self._over = time.monotonic()
        return ready
