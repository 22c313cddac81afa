"""Files that a reader sees whole, directories on the disk, and locks of files.

Locks are those of `flock(2)`, which the kernel releases when the holder dies. Network file systems
support them between hosts if they are mounted with locks. Some file systems have no locks.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
from contextlib import suppress
from io import BufferedReader
from pathlib import Path

PRIVATE = 0o600  # the mode of a file that no other user can read


def write_atomically(
    path: Path, content: bytes, mode: int = 0o666, *, durable: bool = False
) -> None:
    """Replaces a file, or creates it.

    The temporary file beside it has an unpredictable name and must not exist before, so that
    another user cannot have left a file or a link there.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(temporary, flags, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def open_regular(path: Path) -> BufferedReader:
    """Opens a regular file to read. Nothing else is read, as a pipe or a device may never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("it is not a regular file")
    return os.fdopen(descriptor, "rb")


def open_at_once(path: str, flags: int) -> int:
    """Opens a file without waiting for a reader, if it is a pipe; an `opener` for `open`."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)


def make_directory(path: Path) -> None:
    """Makes a directory and its parents, and syncs them to the disk."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Waits until the names in a directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Tries to take the lock of an open file, without waiting; returns whether it has it."""
    return _take(descriptor, fcntl.LOCK_EX)


def open_lock(path: str, flags: int) -> int:
    """Opens a lock file that is this user's alone; an `opener` for `open`.

    Whoever can open a file, if only to read it, can hold its lock.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)  # it may be a pipe
    with suppress(OSError):  # another user's, or a file system without modes
        os.fchmod(descriptor, 0o600)
    return descriptor


def is_locked(path: Path) -> bool:
    """Returns whether a process holds the lock of a file; False if the file does not exist."""
    try:
        with open_regular(path) as file:
            return not _take(file.fileno(), fcntl.LOCK_SH)
    except OSError:
        return False


def _take(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True
