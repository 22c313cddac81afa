"""The output of a job's tasks: each line goes to the task's log and to the launcher's console."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO

from trireme.launch.console import Console

__all__ = ["LogFile", "TaskOutputs"]

LAST_LINES = 12


class TaskOutputs:
    """Shows and keeps the lines of every task. Use it as a context manager.

    Args:
        path: returns the file for the output of a task, by the task's name.
        console: where the lines are shown.
    """

    def __init__(self, path: Callable[[str], Path], console: Console) -> None:
        self._path = path
        self._console = console
        self._logs: dict[str, LogFile] = {}
        self._last_lines: dict[str, deque[str]] = {}

    def __enter__(self) -> TaskOutputs:
        return self

    def __exit__(self, *exception: object) -> None:
        for log in self._logs.values():
            log.close()

    def begin(self, name: str) -> None:
        """Notes that a task is started, for the first time or again."""
        if name in self._logs:
            self._logs[name].close()
        self._logs[name] = LogFile(self._path(name), partial(self._console.say, alarm=True))
        self._last_lines[name] = deque(maxlen=LAST_LINES)

    def show(self, name: str, line: bytes, error: bool) -> None:
        """Takes a line that a task has printed.

        Args:
            name: the task.
            line: the line, without its line end.
            error: whether it went to standard error.
        """
        self._logs[name].write(line)
        text = line.decode("utf-8", errors="replace")
        self._last_lines[name].append(text)
        self._console.line(name, text, error)

    def last_lines(self, name: str) -> list[str]:
        """Returns the last lines that a task has printed since its start."""
        return list(self._last_lines[name])


class LogFile:
    """Appends lines to a file. A full disk loses lines, which are counted, and fails no job.

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
