"""Directories that are published atomically: complete or not at all, even if the process dies.

Beside the published directories lie hidden ones:

    .saving-NAME.pid123.TOKEN   being written; locked by its writer for as long as that lives
    .replaced-NAME.TOKEN        what NAME was before it was written anew
    .removing-NAME.TOKEN        no longer wanted

A process that is killed leaves some of these directories behind. `sweep` removes them; until then
`list_directories` returns a replaced directory whose replacement was never published.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from trireme.file_lock import try_lock

_HIDDEN = re.compile(r"\.(saving|replaced|removing)-(.+?)(?:\.pid(\d+))?\.[0-9a-f]{8}")


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


@contextmanager
def staging(parent: Path, name: str) -> Iterator[Path]:
    """Yields a new directory in which `name` is prepared; deletes it after the block.

    Raises:
        OSError: as `os.mkdir`.
    """
    path = parent / f".saving-{name}.pid{os.getpid()}.{secrets.token_hex(4)}"
    path.mkdir()
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # not every file system has locks; `sweep` then goes by the pid
            try_lock(lock)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def publish(staged: Path, final: Path, allowed: Callable[[], None] = lambda: None) -> None:
    """Publishes a prepared directory under its final name, replacing an earlier directory.

    The files in `staged` must be synced. On failure the earlier directory keeps the name.

    Args:
        staged: the prepared directory.
        final: the final name.
        allowed: called at the last moment; raises where this process may no longer publish. A
            process that takes over the right to publish calls `evict` afterwards, so that a process
            that was stopped between the check and the rename cannot publish either.

    Raises:
        OSError: as `os.replace` and `os.fsync`.
    """
    sync_directory(staged)
    allowed()
    aside = final.with_name(f".replaced-{final.name}.{secrets.token_hex(4)}")
    replaces = os.path.lexists(final)
    if replaces:
        os.replace(final, aside)
    try:
        os.replace(staged, final)
    except BaseException:
        if replaces:
            os.replace(aside, final)
        raise
    sync_directory(final.parent)
    if replaces:
        _delete(aside)


def remove(path: Path) -> None:
    """Deletes a directory; it is never visible half deleted, not even after a power cut.

    Raises:
        OSError: as `os.replace` and `os.fsync`.
    """
    doomed = path.with_name(f".removing-{path.name}.{secrets.token_hex(4)}")
    os.replace(path, doomed)
    sync_directory(path.parent)
    _delete(doomed)


def published_name(name: str) -> str:
    """Returns the name under which a hidden directory was or will be published; else `name`."""
    hidden = _HIDDEN.fullmatch(name)
    return name if hidden is None else hidden[2]


def list_directories(parent: Path) -> dict[str, Path]:
    """Returns the published directories by name, with replaced ones that have no replacement.

    Raises:
        OSError: `parent` cannot be listed.
    """
    found: dict[str, Path] = {}
    aside: dict[str, Path] = {}
    for path in parent.iterdir():
        hidden = _HIDDEN.fullmatch(path.name)
        if hidden is None:
            found[path.name] = path
        elif hidden[1] == "replaced":
            aside[hidden[2]] = path
    return aside | found


def sweep(parent: Path) -> None:
    """Deletes the unfinished directories of dead processes, and restores those set aside.

    Directories that cannot be deleted stay, and do no harm.
    """
    for path in list(parent.iterdir()):
        hidden = _HIDDEN.fullmatch(path.name)
        if hidden is None:
            continue
        with suppress(OSError):
            if hidden[1] == "replaced" and not os.path.lexists(parent / hidden[2]):
                os.replace(path, parent / hidden[2])
            elif hidden[1] != "saving" or _abandoned(path, int(hidden[3] or 0)):
                _delete(path)


def evict(parent: Path, allowed: Callable[[], None] = lambda: None) -> None:
    """Removes the directories that other processes are writing, so that none can be published.

    A directory that cannot be deleted is renamed, and can no longer be published.

    Args:
        parent: the parent directory.
        allowed: called after listing the directory; raises where this process may no longer write.
            Directories that a successor creates later are thus left alone.

    Raises:
        OSError: `parent` cannot be listed, or a directory in it cannot be renamed.
    """
    found = list(parent.iterdir())
    allowed()
    for path in found:
        hidden = _HIDDEN.fullmatch(path.name)
        if hidden is not None and hidden[1] == "saving":
            with suppress(FileNotFoundError):  # published, or deleted, at this moment
                remove(path)


def _delete(path: Path) -> None:
    """Deletes a directory as far as possible, or a file or link that has its name."""
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        path.unlink()


def _abandoned(path: Path, pid: int) -> bool:
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return try_lock(lock)
    except OSError:
        return not psutil.pid_exists(pid)
    finally:
        os.close(lock)
