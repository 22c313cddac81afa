"""A task ends with the launcher that started it, whatever ends the launcher."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["tether"]

_PR_SET_PDEATHSIG = 1


def tether(parent: int) -> None:
    """Has the kernel kill this process as soon as its parent dies.

    To be called by the child itself, first of all: the launcher must not run code between fork
    and exec. Does nothing but the check where the kernel is not Linux.

    Args:
        parent: the process id of the launcher.

    Raises:
        SystemExit: the launcher has died already.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            error = ctypes.get_errno()
            raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    # It may have died before the kernel knew; then this process has another parent by now.
    if os.getppid() != parent:
        raise SystemExit(1)
