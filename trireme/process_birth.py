"""When a process began, so that its id can be told from the same id of a later process."""

from __future__ import annotations

import sys
from pathlib import Path

_START_TICKS = 19
"""The place of `starttime` in `/proc/PID/stat`, see proc(5), counted after the name in brackets."""


def process_birth(pid: int) -> str:
    """Returns a text that no other process of this id has; "" where it is unknown.

    It is the boot's id and the ticks from the boot to the start of the process. The time of day of
    the start, which psutil computes from them, changes when the clock is set.
    """
    if sys.platform != "linux":
        return _by_psutil(pid)
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return f"{boot} {fields[_START_TICKS]}"
    except (OSError, IndexError):  # there is no such process, or it may not be looked at
        return ""


def _by_psutil(pid: int) -> str:
    import psutil  # slow to load

    try:
        return str(psutil.Process(pid).create_time())  # the kernel keeps it as it was
    except psutil.Error:
        return ""
