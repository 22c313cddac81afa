"""The output of a job: the lines of its tasks under their names, and the launcher's own.

The lines of each task go to a log of its own, and to the launcher's console.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Self, TextIO

from trireme.files import open_at_once
from trireme.launch.background_writer import BackgroundWriter
from trireme.printable import printable

LAST_LINES = 12
LOG_BYTES = 1 << 26  # a log with as many becomes `.log.1`, in place of the one before

_WAITING = 10_000  # how many lines wait for a stream that takes them later
_STALLED_SECONDS = 0.5  # a stream that has taken nothing for so long is one that takes nothing
_END_SECONDS = 5.0  # the same, for each line that is left at the end
_COLOURS = ("36", "33", "35", "32", "34", "96", "93", "95", "92", "94")
_ALARM = "31"


class Console:
    """Writes lines to the launcher's standard output and error; any thread may.

    The job goes on without a stream whose reader has gone (`| head`), or whose disk is full.
    """

    def __init__(self, out: TextIO, error: TextIO, environ: Mapping[str, str] = os.environ) -> None:
        self._out = out
        self._error = error
        self._environ = environ
        self._colours: dict[str, str] = {}
        self._unwritable: set[int] = set()
        self._lock = threading.RLock()

    def line(self, name: str, text: str, error: bool) -> None:
        stream = self._error if error else self._out
        colour = self._colours.setdefault(name, _COLOURS[len(self._colours) % len(_COLOURS)])
        self._show(stream, f"{self._paint(stream, colour, f'{name} |')} {text}")

    def say(self, text: str, *, alarm: bool = False) -> None:
        """Shows one line of the launcher's own."""
        mark = self._paint(self._error, _ALARM, "trireme:") if alarm else "trireme:"
        self._show(self._error, f"{mark} {printable(text)}")

    def _paint(self, stream: TextIO, colour: str, text: str) -> str:
        plain = self._environ.get("NO_COLOR") or self._environ.get("TERM") == "dumb"
        return text if plain or not stream.isatty() else f"\x1b[{colour}m{text}\x1b[0m"

    def _show(self, stream: TextIO, line: str) -> None:
        with self._lock:
            self._write(stream, line)

    def _write(self, stream: TextIO, line: str) -> None:
        if id(stream) in self._unwritable:
            return
        encoding = stream.encoding or "utf-8"
        try:  # a task may print characters that the stream lacks
            self._print(stream, line.encode(encoding, "replace").decode(encoding))
        except OSError as error:
            self._unwritable.add(id(stream))
            # Python flushes the stream once more when it ends, which would fail.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
            if not isinstance(error, BrokenPipeError):
                other = self._out if stream is self._error else self._error
                reason = f"trireme: WARNING: output cannot be written ({error.strerror}): it stops"
                self._show(other, reason)

    def _print(self, stream: TextIO, text: str) -> None:
        print(text, file=stream, flush=True)


class BackgroundConsole(Console):
    """A console that writes in threads of its own: a terminal that takes nothing stops no job.

    Lines that come faster than they are taken wait. While nothing is taken (Ctrl-S, a pager, a pipe
    that nobody reads) further ones are dropped, and counted. Use it as a context manager: at the
    end it waits until all is written, for some seconds a line.
    """

    def __init__(self, out: TextIO, error: TextIO, environ: Mapping[str, str] = os.environ) -> None:
        super().__init__(out, error, environ)
        one = BackgroundWriter("console", _WAITING, _STALLED_SECONDS)
        # A terminal that is both shows lines in their order.
        both = out is error or (_file(out) is not None and _file(out) == _file(error))
        other = one if both else BackgroundWriter("console", _WAITING, _STALLED_SECONDS)
        self._writers = {out: one, error: other}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for stream, writer in self._writers.items():
            dropped, writer.dropped = writer.dropped, 0  # so that it waits for room once more
            if dropped:
                writer.put(partial(self._write, stream, _note(dropped)))
            writer.close(_END_SECONDS)

    def _show(self, stream: TextIO, line: str) -> None:
        with self._lock:
            writer = self._writers[stream]
            if writer.dropped:
                if not writer.put(partial(self._write, stream, _note(writer.dropped))):
                    return  # which counts as this line
                writer.dropped = 0
            writer.put(partial(self._write, stream, line))

    def _print(self, stream: TextIO, text: str) -> None:
        if _file(stream) is None:
            super()._print(stream, text)
            return
        # Not by the stream, of which this thread might hold the lock when the process ends.
        descriptor, data = stream.fileno(), f"{text}\n".encode(stream.encoding)
        while data:
            try:
                data = data[os.write(descriptor, data) :]
            except BlockingIOError:
                waiting = select.poll()
                waiting.register(descriptor, select.POLLOUT)
                waiting.poll()


def _note(lines: int) -> str:
    return (
        f"trireme: {lines} lines are not shown, as nothing was taken here for a while: the logs "
        "have those of tasks"
    )


def _file(stream: TextIO) -> tuple[int, int] | None:
    """Returns what identifies the file of a stream; None where it has none of its own."""
    buffer = stream.buffer if isinstance(stream, io.TextIOWrapper) else None
    if not isinstance(getattr(buffer, "raw", buffer), io.FileIO):
        return None
    status = os.fstat(stream.fileno())
    return status.st_dev, status.st_ino


def background_console() -> BackgroundConsole:
    """Returns a launcher's, of its standard output and error, which no terminal may stop."""
    return BackgroundConsole(sys.stdout, sys.stderr)


class TaskOutputs:
    """Shows the lines of every task, and keeps them in a file each. Use it as a context manager."""

    def __init__(self, path: Callable[[str], Path], console: Console) -> None:
        self.path = path
        self.console = console
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
        self._logs[name] = LogFile(self.path(name), partial(self.console.say, alarm=True))
        self._last_lines[name] = deque(maxlen=LAST_LINES)

    def show(self, name: str, line: bytes, error: bool) -> None:
        """Takes a line that a task has printed."""
        self._logs[name].write(line)
        text = line.decode("utf-8", errors="replace")
        self._last_lines[name].append(text)
        self.console.line(name, text, error)

    def last_lines(self, name: str) -> list[str]:
        return list(self._last_lines[name])


class LogFile:
    """Appends lines to a file. A full disk loses lines, which are counted, and fails no job."""

    def __init__(self, path: Path, warn: Callable[[str], None], most: int = LOG_BYTES) -> None:
        self._path = path
        self._most = most
        self._size = 0
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
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    def _append(self, data: bytes) -> None:
        if self._file is not None and self._size + len(data) > self._most:
            self.close()
            with contextlib.suppress(OSError):  # it goes on in a file that grows
                os.replace(self._path, f"{self._path}.1")
        if self._file is None:
            self._file = io.FileIO(self._path, "a", opener=open_at_once)
            self._size = self._file.tell()
        written = self._file.write(data) or 0  # nothing into a pipe that is full
        self._size += written
        if written < len(data):  # an almost full disk takes a part first, and then refuses
            self._size += self._file.write(data[written:]) or 0
