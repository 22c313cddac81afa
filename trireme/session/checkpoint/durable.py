"""Directories that appear whole or not at all, whatever dies in between.

Beside the finished directories, and hidden from whoever lists them, lie:

    .saving-NAME.pid123.TOKEN   being written; locked by its writer for as long as that lives
    .replaced-NAME.TOKEN        what NAME was before it was written anew
    .removing-NAME.TOKEN        no longer wanted

A process that is killed leaves some of these behind. `sweep` tidies up; until then `standing`
finds the directory that was set aside for another that never came.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trireme.file_lock import try_lock

__all__ = [
    "evict",
    "make_directory",
    "publish",
    "remove",
    "staging",
    "standing",
    "sweep",
    "sync_directory",
]

_HIDDEN = re.compile(r"\.(saving|replaced|removing)-(.+?)(?:\.pid(\d+))?\.[0-9a-f]{8}")


def make_directory(path: Path) -> None:
    """Makes a directory and its parents, and sees to it that they outlast a loss of power.

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
    """A new, empty directory in which `name` is prepared; it is gone at the end of the block.

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
    """Gives a prepared directory its name, in place of what had the name before.

    The files in `staged` must be synced already. If this fails, what had the name has it still.

    Args:
        staged: the prepared directory.
        final: its name to be.
        allowed: called at the last moment; raises where this process may no longer do so. Who
            takes that right away calls `evict` afterwards, so that nobody who was stopped between
            the two goes on from there.

    Raises:
        OSError: as `os.replace` and `os.fsync`.
    """
    sync_directory(staged)
    allowed()
    aside = final.with_name(f".replaced-{final.name}.{secrets.token_hex(4)}")
    replaces = final.exists()
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
        shutil.rmtree(aside, ignore_errors=True)


def remove(path: Path) -> None:
    """Deletes a directory; nobody ever sees half of it under its name.

    Raises:
        OSError: as `os.replace`.
    """
    doomed = path.with_name(f".removing-{path.name}.{secrets.token_hex(4)}")
    os.replace(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def standing(parent: Path) -> dict[str, Path]:
    """Returns the directories of `parent` by name, with those set aside for one that never came.

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
    """Deletes what processes that are gone left unfinished, and puts back what they set aside.

    What cannot be deleted stays: it does no harm.
    """
    for path in list(parent.iterdir()):
        hidden = _HIDDEN.fullmatch(path.name)
        if hidden is None:
            continue
        with suppress(OSError):
            if hidden[1] == "replaced" and not (parent / hidden[2]).exists():
                os.replace(path, parent / hidden[2])
            elif hidden[1] != "saving" or _abandoned(path, int(hidden[3] or 0)):
                shutil.rmtree(path, ignore_errors=True)


def evict(parent: Path, allowed: Callable[[], None] = lambda: None) -> None:
    """Takes away what anybody was writing: none of it can be published any more.

    What cannot be deleted has at least lost its name, by which it would be published.

    Args:
        parent: where they write.
        allowed: called when it is known what is there; raises where this process may no longer
            write. So what a successor writes, which begins after that, is left alone.

    Raises:
        OSError: `parent` cannot be listed, or a directory in it cannot be renamed.
    """
    found = list(parent.iterdir())
    allowed()
    for path in found:
        hidden = _HIDDEN.fullmatch(path.name)
        if hidden is not None and hidden[1] == "saving":
            doomed = path.with_name(f".removing-{hidden[2]}.{secrets.token_hex(4)}")
            with suppress(FileNotFoundError):  # published, or deleted, at this moment
                os.replace(path, doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def _abandoned(path: Path, pid: int) -> bool:
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return try_lock(lock)
    except OSError:
        return not _alive(pid)
    finally:
        os.close(lock)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
