"""A task's output in a file; a disk that is full costs lines, and not the job."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import IO

__all__ = ["LogFile"]


class LogFile:
    """Appends lines to a file, and goes on without them where that fails.

    Args:
        path: the file.
        complain: told once when lines cannot be kept, and again after they could be.
    """

    def __init__(self, path: Path, complain: Callable[[str], None]) -> None:
        self._path = path
        self._complain = complain
        self._file: IO[bytes] | None = None
        self._missing = 0

    def write(self, line: bytes) -> None:
        """Appends a line, without its line end."""
        try:
            if self._missing:
                self._append(b"[trireme: %d lines could not be written here]\n" % self._missing)
            self._append(line + b"\n")
        except OSError as error:
            if not self._missing:
                self._complain(
                    f"WARNING: {self._path} cannot be written ({error.strerror}): lines are shown "
                    "and not kept until it can be"
                )
            self._missing += 1
        else:
            self._missing = 0

    def close(self) -> None:
        """Closes the file, if it is open."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    def _append(self, data: bytes) -> None:
        if self._file is None:
            self._file = self._path.open("ab", buffering=0)
        rest = memoryview(data)
        while rest:  # what is left of a disk takes a part of it, and then refuses
            rest = rest[self._file.write(rest) :]
