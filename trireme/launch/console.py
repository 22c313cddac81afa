"""The launcher's output: the lines of its tasks under their names, and its own lines."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Mapping
from typing import TextIO

__all__ = ["Console"]

_COLOURS = ("36", "33", "35", "32", "34", "96", "93", "95", "92", "94")
_ALARM = "31"
_CLEAR = "\r\x1b[2K"


class Console:
    """Writes lines to the launcher's standard output and error; any thread may.

    On a terminal, one status line stays below them. If the reader of a stream has gone
    (`trireme run ... | head`), or the disk that it goes to is full, the job goes on without that
    stream.
    """

    def __init__(self, out: TextIO, error: TextIO, environ: Mapping[str, str]) -> None:
        self._out = out
        self._error = error
        self._environ = environ
        self._colours: dict[str, str] = {}
        self._unwritable: set[int] = set()
        self._status: str | None = None
        self._lock = threading.Lock()

    @property
    def live(self) -> bool:
        """Whether a status line can be shown: both streams are a terminal."""
        terminal = self._out.isatty() and self._error.isatty()
        return terminal and self._environ.get("TERM", "dumb") != "dumb"

    def status(self, text: str | None) -> None:
        """Replaces the status line below all others; None removes it."""
        with self._lock:
            before, self._status = self._status, text
            if before is not None or text is not None:
                self._write(self._out, _CLEAR + self._below(), end="")

    def _below(self) -> str:
        width = shutil.get_terminal_size().columns - 1
        return "" if self._status is None else self._status[:width]

    def line(self, name: str, text: str, error: bool) -> None:
        """Shows one line of a task's output."""
        stream = self._error if error else self._out
        colour = self._colours.setdefault(name, _COLOURS[len(self._colours) % len(_COLOURS)])
        self._show(stream, f"{self._paint(stream, colour, f'{name} |')} {text}")

    def say(self, text: str, *, alarm: bool = False) -> None:
        """Shows one line of the launcher's own."""
        mark = self._paint(self._error, _ALARM, "trireme:") if alarm else "trireme:"
        self._show(self._error, f"{mark} {text}")

    def _paint(self, stream: TextIO, colour: str, text: str) -> str:
        plain = self._environ.get("NO_COLOR") or self._environ.get("TERM") == "dumb"
        return text if plain or not stream.isatty() else f"\x1b[{colour}m{text}\x1b[0m"

    def _show(self, stream: TextIO, line: str) -> None:
        with self._lock:
            if self._status is None:
                self._write(stream, line)
            else:
                self._write(stream, _CLEAR + line)
                self._write(self._out, self._below(), end="")

    def _write(self, stream: TextIO, line: str, end: str = "\n") -> None:
        if id(stream) in self._unwritable:
            return
        try:
            print(_printable(line, stream), end=end, file=stream, flush=True)
        except OSError as error:
            self._unwritable.add(id(stream))
            # Python flushes the stream once more when it ends, which would fail.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
            if not isinstance(error, BrokenPipeError):
                other = self._out if stream is self._error else self._error
                reason = f"trireme: WARNING: output cannot be written ({error.strerror}): it stops"
                self._write(other, reason)


def _printable(line: str, stream: TextIO) -> str:
    """Replaces the characters that the stream's encoding lacks: a task may print anything."""
    encoding = stream.encoding or "utf-8"
    return line.encode(encoding, "replace").decode(encoding)
