"""File locks by `flock(2)`, which the kernel releases when the holder dies.

Network file systems support them between hosts if they are mounted with locks. Some file systems
have no locks.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path


def try_lock(descriptor: int) -> bool:
    """Tries to take the lock of an open file, without waiting; returns whether it has it.

    Raises:
        OSError: the file system has no locks.
    """
    return _take(descriptor, fcntl.LOCK_EX)


def open_lock(path: str, flags: int) -> int:
    """Opens a lock file that is this user's alone; an `opener` for `open`.

    Whoever can open a file, if only to read it, can hold its lock.

    Raises:
        OSError: as `os.open`.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    with suppress(OSError):  # another user's, or a file system without modes
        os.fchmod(descriptor, 0o600)
    return descriptor


def holds_lock(pid: int, path: Path) -> bool:
    """Returns whether a process of this user holds the lock of a file; Linux only."""
    try:
        own = path.stat()
        for opened in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # it has just been closed
                if os.path.samestat(opened.stat(), own):
                    info = Path(f"/proc/{pid}/fdinfo/{opened.name}").read_text()
                    if "FLOCK" in info:
                        return True
    except OSError:  # it has ended, or is another user's
        return False
    return False


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
