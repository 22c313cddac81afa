"""Writes lines to streams in a thread of its own, so that no terminal can stop who writes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

_MOST = 1 << 20
"""How many characters wait, for a stream that takes them later."""
_BATCH = 1 << 16
"""How many of them are written at once."""
_STALLED_SECONDS = 0.5
"""A stream that has taken nothing for so long is one that takes nothing."""
_END_SECONDS = 5.0
"""For how long, at the end, a stream may take nothing until what is left is given up."""


class LineWriter:
    """Has lines written, in their order, by a thread that begins with the first of them.

    Lines that come faster than a stream takes them wait for it, as they would without a thread.
    While a stream takes nothing (Ctrl-S, a pager, a pipe that nobody reads) nobody waits: further
    lines are dropped, and counted, until half of those that wait are written.

    Args:
        write: writes lines to a stream, and calls `took` whenever it has taken some.
        name: of the thread.
        note: returns the line that stands for so many dropped ones.
    """

    def __init__(
        self, write: Callable[[TextIO, str], None], name: str, note: Callable[[int], str]
    ) -> None:
        self._write = write
        self._name = name
        self._note = note
        self._lines: deque[tuple[TextIO, str]] = deque()
        self._size = 0  # of what waits, and is not being written
        self._dropped = 0
        self._lacking: TextIO | None = None  # the stream of the line that was dropped last
        self._writing = False
        self._closed = False
        self._given_up = False  # a stream that takes nothing, at the end
        self._took = 0.0
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()

    def took(self) -> None:
        """Notes that a stream takes what is written."""
        self._took = time.monotonic()

    def put(self, stream: TextIO, line: str) -> None:
        """Has a line written, or drops it."""
        with self._changed:
            if not self._lines and not self._writing:
                self.took()  # nothing was to be taken
            if not self._has_room(len(line)):
                self._dropped, self._lacking = self._dropped + 1, stream
                return
            self._note_dropped()
            self._append(stream, line)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def wait(self) -> None:
        """Waits until all is written, or gives up a stream that takes nothing."""
        began = time.monotonic()
        with self._changed:
            self._note_dropped()
            while (self._lines or self._writing) and not self._given_up:
                left = max(began, self._took) + _END_SECONDS - time.monotonic()
                self._given_up = left <= 0
                self._changed.wait(max(left, 0.0))

    def close(self) -> None:
        """Waits as `wait`, and ends the thread."""
        self.wait()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and not self._given_up:
            self._thread.join()

    def _has_room(self, length: int) -> bool:
        """Returns whether a line can wait; waits for room itself while lines are taken."""
        if self._dropped and self._size > _MOST // 2:
            return False
        while self._lines and self._size + length > _MOST:
            left = self._took + _STALLED_SECONDS - time.monotonic()
            if left <= 0:
                return False
            self._changed.wait(left)
        return True

    def _note_dropped(self) -> None:
        if self._lacking is not None:
            self._append(self._lacking, self._note(self._dropped))
            self._dropped, self._lacking = 0, None

    def _append(self, stream: TextIO, line: str) -> None:
        self._lines.append((stream, line))
        self._size += len(line)
        self._changed.notify_all()

    def _run(self) -> None:
        while (batch := self._next()) is not None:
            self._write(*batch)

    def _next(self) -> tuple[TextIO, str] | None:
        """Returns lines that follow each other in one stream; None at the end."""
        with self._changed:
            self._writing = False
            self._changed.notify_all()
            while not self._lines:
                if self._closed:
                    return None
                self._changed.wait()
            stream, first = self._lines.popleft()
            batch, size = [first], len(first)
            while self._lines and self._lines[0][0] is stream and size < _BATCH:
                batch.append(self._lines.popleft()[1])
                size += len(batch[-1])
            self._size -= size
            self._writing = True
            self.took()
            self._changed.notify_all()
            return stream, "\n".join(batch)
