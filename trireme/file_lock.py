"""File locks by `flock(2)`, which the kernel releases when the holder dies.

Network file systems support them between hosts if they are mounted with locks. Some file systems
have no locks.
"""

from __future__ import annotations

import fcntl
from pathlib import Path


def try_lock(descriptor: int) -> bool:
    """Tries to take the lock of an open file, without waiting; returns whether it has it.

    Raises:
        OSError: the file system has no locks.
    """
    return _take(descriptor, fcntl.LOCK_EX)


def is_locked(path: Path) -> bool:
    """Returns whether a process holds the lock of a file; False if the file does not exist."""
    try:
        file = path.open()
    except OSError:
        return False
    with file:
        try:
            return not _take(file.fileno(), fcntl.LOCK_SH)
        except OSError:
            return False


def _take(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True
