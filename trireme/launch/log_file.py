"""A task's output in a file. A full disk loses lines and does not fail the job."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import IO

__all__ = ["LogFile"]


class LogFile:
    """Appends lines to a file. Lines that cannot be written are counted and dropped.

    Args:
        path: the file.
        warn: called with a line for the user when writing begins to fail.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._path = path
        self._warn = warn
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
                self._warn(
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
        while rest:  # an almost full disk takes a part first, and then refuses
            rest = rest[self._file.write(rest) :]
