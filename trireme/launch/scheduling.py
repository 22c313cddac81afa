"""How the system's scheduler treats a task that mostly waits for others."""

from __future__ import annotations

import os
from contextlib import suppress

__all__ = ["take_turns"]


def take_turns() -> bool:
    """Has this process, when it wakes, wait for a free core instead of interrupting another.

    In a synchronous round whoever is interrupted is waited for next, so nothing is won by it. Of
    asynchronous workers none waits for another: there a server had better interrupt. It is what
    the policy `SCHED_BATCH` of Linux does; threads started from now on inherit it.

    Returns:
        Whether the system has it, and allows it.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return False
    with suppress(OSError):
        if os.sched_getscheduler(0) == os.SCHED_OTHER:  # else the user has chosen another
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    return os.sched_getscheduler(0) == os.SCHED_BATCH
