"""Has the kernel kill a task when the launcher that started it dies."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["end_with_parent"]

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Has the kernel kill this process as soon as its parent dies.

    The child calls it itself, before anything else, because the launcher must not run code between
    fork and exec. On other systems than Linux it only checks that the parent lives.

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
    # If the parent died before the call, this process has another parent by now.
    if os.getppid() != parent:
        raise SystemExit(1)
