"""Wakes a thread that waits for descriptors."""

from __future__ import annotations

import socket
from contextlib import suppress

__all__ = ["Wakeup"]


class Wakeup:
    """A descriptor that becomes readable when another thread calls `wake`."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """Returns the descriptor to wait on."""
        return self._reader.fileno()

    def wake(self) -> None:
        """Makes the descriptor readable. Any thread may call it, also after `close`."""
        with suppress(OSError):  # full: the thread is awake already; closed: it has ended
            self._writer.send(b"\0")

    def drain(self) -> None:
        """Makes the descriptor unreadable again."""
        with suppress(BlockingIOError):
            self._reader.recv(4096)

    def close(self) -> None:
        """Closes the descriptor. May be repeated."""
        self._reader.close()
        self._writer.close()
