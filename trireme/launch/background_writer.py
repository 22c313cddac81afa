"""Writes in a thread of its own, so that no disk and no terminal can stop who writes."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Self, TextIO

_END_SECONDS = 2.0  # how long each write that is left may take at the end


class BackgroundWriter:
    """Carries out writes one after the other, in a thread of its own. A context manager.

    Where the disk or the terminal takes nothing, writes wait, up to `capacity`. Further ones are
    dropped.

    Args:
        name: of the thread.
        capacity: how many writes wait.
        patience: for how many seconds `put` waits for room, where none was dropped before.

    Attributes:
        dropped: how many were dropped. Who has told of them sets it to 0.
    """

    def __init__(self, name: str, capacity: int = 1000, patience: float = 0.0) -> None:
        self.dropped = 0
        self._patience = patience
        self._queue: queue.Queue[Callable[[], object] | None] = queue.Queue(capacity)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def put(self, write: Callable[[], object]) -> bool:
        """Has a function called in the thread; drops it and returns False if there is no room."""
        try:
            self._queue.put(write, timeout=0.0 if self.dropped else self._patience)
        except queue.Full:
            self.dropped += 1
            return False
        return True

    def close(self, seconds: float = _END_SECONDS) -> None:
        """Waits until all is written. What is left when a write takes so long is lost."""
        with suppress(queue.Full):
            self._queue.put(None, timeout=seconds)
        before = None
        while self._thread.is_alive() and (waiting := self._queue.qsize()) != before:
            before = waiting
            self._thread.join(seconds)

    def _run(self) -> None:
        while (write := self._queue.get()) is not None:
            with suppress(OSError, ValueError):  # the other end is gone, or the file is closed
                write()


class BackgroundHandler(logging.Handler):
    """Writes the lines of a log to a stream, through a `BackgroundWriter`."""

    def __init__(self, writer: BackgroundWriter, stream: TextIO) -> None:
        super().__init__()
        self._writer = writer
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        """Has a record written."""
        self._writer.put(partial(self._write, self.format(record)))

    def _write(self, line: str) -> None:
        self._stream.write(f"{line}\n")
        self._stream.flush()
