"""Waits for many descriptors at once, with less overhead than `selectors`, and ends such waits."""

from __future__ import annotations

import select
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

READABLE: int = select.POLLIN
WRITABLE: int = select.POLLOUT

Callback = Callable[[int], None]
"""Called with the events as bits: `READABLE`, `WRITABLE`, others for hang-up and error."""


class Poller:
    """Waits for the events of descriptors, each with a callback.

    It uses epoll where the system has it and poll elsewhere, which report the same bits.
    """

    def __init__(self) -> None:
        self._callbacks: dict[int, Callback] = {}
        if sys.platform == "linux":
            self._poll = select.epoll()
            self._unit = 1.0
        else:
            self._poll = select.poll()
            self._unit = 1000.0

    def register(self, descriptor: int, events: int, callback: Callback) -> None:
        """Waits for events of a descriptor from now on; hang-up and error are always reported."""
        self._poll.register(descriptor, events)
        self._callbacks[descriptor] = callback

    def modify(self, descriptor: int, events: int) -> None:
        """Waits for other events of a descriptor."""
        self._poll.modify(descriptor, events)

    def unregister(self, descriptor: int) -> None:
        """Stops waiting for a descriptor. Call it before the descriptor is closed."""
        self._poll.unregister(descriptor)
        del self._callbacks[descriptor]

    def events(self, seconds: float) -> Iterator[tuple[Callback, int]]:
        """Waits for events, at most so many seconds, and yields callbacks with their events.

        A callback may come without an event of its own: the descriptor may have belonged to another
        connection when the events were collected.
        """
        for descriptor, mask in self._poll.poll(seconds * self._unit):
            callback = self._callbacks.get(descriptor)
            if callback is not None:
                yield callback, mask

    def close(self) -> None:
        """Closes the poller's own descriptor."""
        if sys.platform == "linux":
            self._poll.close()


class Wakeup:
    """A descriptor that becomes readable when another thread calls `wake`."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
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
