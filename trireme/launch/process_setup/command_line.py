"""The command line under which lists of processes show this one."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from pathlib import Path


def show_command_line(words: Sequence[str]) -> bool:
    """Replaces the command line of this process in `ps` and `/proc/PID/cmdline`.

    The new one is cut where it is longer than the one with which the process was started. The
    environment, which the kernel keeps behind it, and shows too, stays.
    """
    if sys.platform != "linux":
        return False
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5)
    except (OSError, ValueError, IndexError):
        return False
    size = end - start
    if start == 0 or size < 1:
        return False
    line = b"\0".join(word.encode("utf-8", "surrogateescape") for word in words)
    # The last byte stays 0: otherwise the kernel would show what follows as well.
    ctypes.memmove(start, line[: size - 1].ljust(size, b"\0"), size)
    return True
