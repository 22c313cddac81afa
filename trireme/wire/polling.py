"""Waits for descriptors: for many at once with less overhead than `selectors`, and by spinning."""

from __future__ import annotations

import math
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

READABLE: int = select.POLLIN
WRITABLE: int = select.POLLOUT

Callback = Callable[[int], None]  # called with events as bits: `READABLE`, `WRITABLE`, others


class Poller:
    """Waits for events of descriptors, each with a callback: by epoll, or by poll, alike."""

    def __init__(self) -> None:
        self._callbacks: dict[int, Callback] = {}
        if sys.platform == "linux":
            self._poll, self._unit = select.epoll(), 1.0
        else:
            self._poll, self._unit = select.poll(), 1000.0

    def register(self, descriptor: int, events: int, callback: Callback) -> None:
        self._poll.register(descriptor, events)
        self._callbacks[descriptor] = callback

    def modify(self, descriptor: int, events: int) -> None:
        self._poll.modify(descriptor, events)

    def unregister(self, descriptor: int) -> None:
        """Stops waiting for a descriptor. Call it before the descriptor is closed."""
        self._poll.unregister(descriptor)
        del self._callbacks[descriptor]

    def events(self, seconds: float) -> Iterator[tuple[Callback, int]]:
        """Yields callbacks with their events. One may come without an event of its own."""
        for descriptor, mask in self._poll.poll(seconds * self._unit):
            callback = self._callbacks.get(descriptor)
            if callback is not None:
                yield callback, mask

    def close(self) -> None:
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
        with suppress(BlockingIOError):
            self._reader.recv(4096)

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


class SpinWait:
    """Spins for a while, then blocks; decision 0019 has what it gains.

    It spins for a `share` of the time since the last wait ended, from `least` to `most` seconds: a
    thread that computes for long between two waits may. All waits of one thread share one object.
    """

    __slots__ = ("_last_end", "_least", "_most", "_share")

    def __init__(self, *, least: float, most: float, share: float = 0.0) -> None:
        self._least, self._most, self._share = least, most, share
        self._last_end = time.monotonic()  # of the last wait

    def wait(self, poll: Callable[[int], object], seconds: float, *, look: bool = True) -> bool:
        """Waits until `poll` reports an event, at most `seconds`; returns whether it did."""
        now = time.monotonic()
        end, ready = now + seconds, False
        if look:
            share = self._share * (now - self._last_end)
            until = min(now + min(max(self._least, share), self._most), end)
            while not (ready := bool(poll(0))) and time.monotonic() < until:
                os.sched_yield()
        if not ready:
            ready = bool(poll(math.ceil(max(end - time.monotonic(), 0.0) * 1000)))
        self._last_end = time.monotonic()
        return ready
