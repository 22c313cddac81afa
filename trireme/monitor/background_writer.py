"""Writes in a thread of its own, so that no disk and no terminal can stop who writes."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Self, TextIO

_END_SECONDS = 2.0
"""How long what is left may take at the end."""


class BackgroundWriter:
    """Carries out writes one after the other, in a thread of its own. A context manager.

    Where the disk or the terminal takes nothing, writes wait, up to `capacity`. Further ones are
    dropped.
    """

    def __init__(self, name: str, capacity: int = 1000) -> None:
        self._queue: queue.Queue[Callable[[], object] | None] = queue.Queue(capacity)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def put(self, write: Callable[[], object]) -> None:
        """Has a function called in the thread, or drops it. Never blocks."""
        with suppress(queue.Full):
            self._queue.put_nowait(write)

    def close(self, seconds: float = _END_SECONDS) -> None:
        """Waits until all is written, at most so long; what is left then is lost."""
        deadline = time.monotonic() + seconds
        with suppress(queue.Full):
            self._queue.put(None, timeout=seconds)
        self._thread.join(max(0.0, deadline - time.monotonic()))

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
