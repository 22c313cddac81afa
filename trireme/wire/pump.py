"""A thread that sends frames whose payloads become known little by little.

While it runs the connections are its own: nobody else may send, receive or close.
"""

from __future__ import annotations

import math
import select
import socket
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress

from trireme.clock import Clock, MonotonicClock
from trireme.errors import WireError, WireTimeout
from trireme.wire.connection import Connection

__all__ = ["Pump"]

_SLICE = 1.0  # seconds between two looks at the deadline while nothing happens


class Pump:
    """Sends the frames that several connections have begun, as their payloads are given.

    Used once: it ends with `finish` or `stop`.

    Args:
        connections: each with a frame begun.
        clock: what the deadline is measured with.
    """

    def __init__(self, connections: Sequence[Connection], *, clock: Clock | None = None) -> None:
        self._connections = list(connections)
        self._clock = clock or MonotonicClock()
        self._pieces: deque[tuple[int, Iterable[memoryview]]] = deque()
        self._failures: list[WireError | None] = [None] * len(self._connections)
        self._bug: BaseException | None = None
        self._deadline: float | None = None
        self._seconds = math.inf
        self._stopped = False
        self._door, self._bell = socket.socketpair()
        self._door.setblocking(False)
        self._bell.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="push", daemon=True)
        self._thread.start()

    def give(self, index: int, payload: Iterable[memoryview]) -> None:
        """Gives more of one connection's payload; returns at once.

        Args:
            index: which of the connections.
            payload: see `Connection.extend`.
        """
        self._pieces.append((index, payload))
        self._wake()

    def finish(self, timeout: float) -> list[WireError | None]:
        """Waits until all that was given has been sent; then the connections are the caller's.

        Args:
            timeout: in seconds; what is not sent by then has failed.

        Returns:
            For each connection why it could not be sent; None where it was.
        """
        self._seconds = timeout
        self._deadline = self._clock.now() + timeout
        self._end()
        if self._bug is not None:
            raise self._bug
        return list(self._failures)

    def stop(self) -> None:
        """Sends nothing more; the connections are the caller's, who can only close them."""
        self._stopped = True
        self._end()

    def _end(self) -> None:
        self._wake()
        self._thread.join()  # its own waits have the deadline
        self._door.close()
        self._bell.close()

    def _wake(self) -> None:
        with suppress(OSError):  # a full pipe has woken it already; a closed one, it has ended
            self._bell.send(b"\0")

    # In the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopped:
                ending = self._deadline is not None  # before the pieces: none comes after it
                self._take()
                blocked = [i for i in range(len(self._connections)) if not self._advance(i)]
                if ending and not blocked:
                    return
                self._wait(blocked)
        except BaseException as error:
            self._bug = error

    def _take(self) -> None:
        while self._pieces:
            index, payload = self._pieces.popleft()
            if self._failures[index] is None:
                self._connections[index].extend(payload)

    def _advance(self, index: int) -> bool:
        """Sends what one connection takes; returns whether there is no need to wait for it."""
        if self._failures[index] is not None:
            return True
        try:
            return self._connections[index].advance()
        except WireError as error:
            self._failures[index] = error
            return True

    def _wait(self, blocked: Sequence[int]) -> None:
        """Waits for room in a stream, or to be woken."""
        seconds = _SLICE
        if self._deadline is not None:
            seconds = min(seconds, self._deadline - self._clock.now())
            if seconds <= 0:
                for index in blocked:
                    self._failures[index] = WireTimeout(
                        f"{self._connections[index].peer} did not take what was sent to it within "
                        f"{self._seconds:g} s: it hangs"
                    )
                return
        poller = select.poll()
        poller.register(self._door, select.POLLIN)
        for index in blocked:
            poller.register(self._connections[index], select.POLLOUT)
        for descriptor, _ in poller.poll(math.ceil(seconds * 1000)):
            if descriptor == self._door.fileno():
                with suppress(BlockingIOError):
                    self._door.recv(4096)
