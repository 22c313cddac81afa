"""Files that a reader sees whole, the old content or the new, and directories on the disk."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

PRIVATE = 0o600
"""The mode of a file that no other user can read."""


def write_atomically(
    path: Path, content: bytes, mode: int = 0o666, *, durable: bool = False
) -> None:
    """Replaces a file, or creates it.

    The temporary file beside it has an unpredictable name and must not exist before, so that
    another user cannot have left a file or a link there.

    Args:
        path: the file.
        content: its new content.
        mode: its mode, which the umask limits.
        durable: whether to wait until the content is on the disk.

    Raises:
        OSError: it cannot be written; then the old file stays, and no temporary one.
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


def make_directory(path: Path) -> None:
    """Makes a directory and its parents, and syncs them to the disk.

    Raises:
        OSError: as `os.mkdir` and `os.fsync`.
    """
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Waits until the names in a directory are on the disk.

    Raises:
        OSError: as `os.fsync`.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
