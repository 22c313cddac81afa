"""A thread that sends frames whose payloads become available piece by piece.

While it runs, only this thread may use the connections.
"""

from __future__ import annotations

import math
import select
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from trireme.clock import Clock, MonotonicClock
from trireme.errors import ConnectionBroken, WireError, WireTimeout
from trireme.wire.connection import Connection
from trireme.wire.polling import Wakeup

_SLICE = 1.0  # seconds between two checks of the deadline while nothing happens
_CHECK_SECONDS = 0.1  # between two looks at whether a peer is gone


class BackgroundSender:
    """Sends the frames that several connections have begun, piece by piece.

    A sender is used once. It ends with `finish` or `stop`.

    Args:
        connections: connections in each of which a frame was begun.
        clock: the clock that the deadline is measured with.
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
        self._wakeup = Wakeup()
        self._thread = threading.Thread(target=self._run, name="push", daemon=True)
        self._thread.start()

    def give(self, index: int, payload: Iterable[memoryview]) -> None:
        """Adds to the payload of one connection's frame; returns at once.

        Args:
            index: the connection's index.
            payload: see `Connection.extend`.
        """
        self._pieces.append((index, payload))
        self._wakeup.wake()

    def finish(
        self, timeout: float, gone: Callable[[int], bool] = lambda index: False
    ) -> list[WireError | None]:
        """Waits until all pieces have been sent, and gives the connections back to the caller.

        Args:
            timeout: in seconds. A frame that is not sent by then has failed.
            gone: returns whether a connection's frame is of no use any longer. It has failed then.
                Called in this thread, about ten times a second.

        Returns:
            For each connection the error that kept its frame from being sent; None if it was sent.
        """
        self._seconds = timeout
        self._deadline = self._clock.now() + timeout
        self._wakeup.wake()
        self._thread.join(_CHECK_SECONDS)
        while self._thread.is_alive():
            self._give_up(gone)
            self._thread.join(_CHECK_SECONDS)
        self._end()
        if self._bug is not None:
            raise self._bug
        return list(self._failures)

    def stop(self) -> None:
        """Stops sending and gives the connections back to the caller, who can only close them."""
        self._stopped = True
        self._end()

    def _give_up(self, gone: Callable[[int], bool]) -> None:
        """Fails the frames that are of no use any longer."""
        for index, connection in enumerate(self._connections):
            if self._failures[index] is None and gone(index):
                self._failures[index] = ConnectionBroken(f"{connection.peer} is gone")
                self._wakeup.wake()

    def _end(self) -> None:
        self._wakeup.wake()
        self._thread.join()  # its waits end at the deadline
        self._wakeup.close()

    # In the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopped:
                ending = self._deadline is not None  # read first: no piece comes after `finish`
                while self._pieces:
                    index, payload = self._pieces.popleft()
                    if self._failures[index] is None:
                        self._connections[index].extend(payload)
                blocked = [i for i in range(len(self._connections)) if not self._advance(i)]
                if ending and not blocked:
                    return
                self._wait(blocked)
        except BaseException as error:
            self._bug = error

    def _advance(self, index: int) -> bool:
        """Sends what one connection takes; returns False if the rest has to wait for room."""
        if self._failures[index] is not None:
            return True
        try:
            return self._connections[index].advance()
        except WireError as error:
            self._failures[index] = error
            return True

    def _wait(self, blocked: Sequence[int]) -> None:
        """Waits for room in a stream, or for a wakeup."""
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
        poller.register(self._wakeup, select.POLLIN)
        for index in blocked:
            poller.register(self._connections[index], select.POLLOUT)
        for descriptor, _ in poller.poll(math.ceil(seconds * 1000)):
            if descriptor == self._wakeup.fileno():
                self._wakeup.drain()
