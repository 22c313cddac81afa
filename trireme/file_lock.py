"""Locks on files that belong to an open file, and that the kernel gives back when its holder dies.

They are those of `flock(2)`. Network file systems have them between hosts where they are mounted
with locks; some file systems have none.
"""

from __future__ import annotations

import errno
import fcntl
from pathlib import Path

__all__ = ["is_locked", "try_lock"]

_HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


def try_lock(descriptor: int) -> bool:
    """Takes the lock of an open file and does not wait for it; returns whether it could.

    Raises:
        OSError: this file system has no locks.
    """
    return _take(descriptor, fcntl.LOCK_EX)


def is_locked(path: Path) -> bool:
    """Returns whether a process holds the lock of a file; False where there is no such file."""
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
    except OSError as error:
        if error.errno in _HELD:
            return False
        raise
    return True
