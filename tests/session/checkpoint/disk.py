"""A disk that fails, or on which the process dies, at any operation of a save: by wrapping.

Every change that a program makes to a file system is one of these operations: a file is opened to
write, a piece is written, a file or a directory is synced, a name is made, moved or removed.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

NEEDS_ROOM = {"open to write", "write", "mkdir", "link"}
"""The operations that a full disk refuses."""

DIED = 9


class Disk:
    """Wraps the operations of this process until the patches are undone.

    Args:
        patch: undoes the wrapping.
        at: the number, from 1, of the operation at which `fail` is called; 0 for none.
        fail: called before that operation, and before all later ones if `lasting`. It gets the
            name of the operation, and may raise.
        lasting: whether the failure lasts.

    Attributes:
        operations: the names of the operations so far.
    """

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        at: int = 0,
        fail: Callable[[Disk, str], None] = lambda disk, name: None,
        *,
        lasting: bool = False,
    ) -> None:
        self.operations: list[str] = []
        self._at = at
        self._fail = fail
        self._lasting = lasting
        self._unsynced: dict[str, int] = {}  # files by path, and how much of them is on the disk
        self._moved: list[tuple[str, str]] = []  # since their directory was synced
        self._open = os.open
        patch.setattr(io, "open", self._wrapped_io(io.open))
        for name in ("mkdir", "unlink", "rmdir", "link"):
            patch.setattr(os, name, self._wrapped(name, getattr(os, name)))
        for name in ("replace", "rename"):
            patch.setattr(os, name, self._wrapped_move(name, getattr(os, name)))
        patch.setattr(os, "open", self._wrapped_open(os.open))
        patch.setattr(os, "fsync", self._wrapped_sync(os.fsync))

    # What may fail ------------------------------------------------------------------------------

    def lose_what_is_not_synced(self) -> None:
        """Makes the disk what a power cut may leave: only what was synced is there."""
        for old, new in reversed(self._moved):
            os.rename.__wrapped__(new, old)  # type: ignore[attr-defined]
        for path, kept in self._unsynced.items():
            if os.path.exists(path):
                os.truncate(path, kept)

    def _before(self, name: str) -> None:
        self.operations.append(name)
        count = len(self.operations)
        if self._at and (count == self._at or (self._lasting and count > self._at)):
            self._fail(self, name)

    # The wrappers --------------------------------------------------------------------------------

    def _wrapped(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self._before(name)
            return original(*args, **options)

        return call

    def _wrapped_move(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(source: Any, target: Any, **options: Any) -> Any:
            self._before(name)
            original(source, target, **options)
            self._moved.append((os.fspath(source), os.fspath(target)))

        call.__wrapped__ = original  # type: ignore[attr-defined]
        return call

    def _wrapped_open(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, flags: int, *args: Any, **options: Any) -> Any:
            if flags & (os.O_WRONLY | os.O_RDWR):
                self._before("open to write")
            return original(path, flags, *args, **options)

        return call

    def _wrapped_sync(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(descriptor: int) -> None:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            self._before("fsync")
            original(descriptor)
            self._unsynced.pop(path, None)
            self._moved = [move for move in self._moved if os.path.dirname(move[1]) != path]

        return call

    def _wrapped_io(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if "w" not in mode:
                return original(path, mode, *args, **options)
            self._before("open to write")
            self._unsynced[os.path.realpath(path)] = 0
            # Unbuffered: what is written is with the system at once.
            return _File(self, original(path, mode, buffering=0))

        return call


class _File:
    """A file that is written; half of a piece is written before the failure in the middle of it."""

    def __init__(self, disk: Disk, file: Any) -> None:
        self._disk = disk
        self._file = file

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self._disk._before("write")
        self._file.write(view[: len(view) // 2])
        self._disk._before("write")
        self._file.write(view[len(view) // 2 :])
        return len(view)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def no_room(disk: Disk, name: str) -> None:
    """The disk is full."""
    if name in NEEDS_ROOM:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def input_output_error(disk: Disk, name: str) -> None:
    """The disk is broken."""
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def read_only(disk: Disk, name: str) -> None:
    """The file system has become one that is only read, as Linux does after an error."""
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def killed(disk: Disk, name: str) -> None:
    """The process is killed; what it has given to the system is there."""
    os._exit(DIED)


def power_cut(disk: Disk, name: str) -> None:
    """The power is cut; what was not synced is lost."""
    disk.lose_what_is_not_synced()
    os._exit(DIED)


def operations_of(act: Callable[[], object]) -> list[str]:
    """Returns the names of the operations that `act` makes."""
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch)
        act()
        return disk.operations


def in_a_child(act: Callable[[], object]) -> int:
    """Runs `act` in a fork of this process and returns the child's exit status."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            act()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def hidden(run: Path) -> list[str]:
    """Returns the names of what is not published, or is no longer."""
    return [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]
