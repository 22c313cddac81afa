"""Typed messages with payloads over a `Stream`: blocking for workers, non-blocking for servers.

Payloads are written from, and read into, the caller's own memory. Only `offer` copies what the
stream does not take at once, and a reader copies what came in one read with the header.
"""

from __future__ import annotations

import math
import select
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import islice
from typing import TYPE_CHECKING

from trireme.clock import Clock, MonotonicClock
from trireme.errors import (
    ConnectionBroken,
    ConnectionClosed,
    WireError,
    WireTimeout,
)
from trireme.wire.frame_reader import Destination, FrameReader, Incoming, again, skip_bytes
from trireme.wire.message import Catalog, Limits, Message, pack_header
from trireme.wire.polling import SpinWait
from trireme.wire.transport import Stream

if TYPE_CHECKING:
    from typing_extensions import Buffer

_DEFAULT_LIMITS = Limits()
_COPIED_BYTES = 1 << 16  # metadata of fewer is copied behind its header, to be one view
_REUSED_BYTES = 1 << 20  # copies of at least this size use one memory, one after the other
_FRONT_PIECES = 64  # how many queued copies are written at once
_CHECK_SECONDS = 0.1  # at most, between two checks while a send waits


class Connection(FrameReader, AbstractContextManager["Connection", None]):
    """Messages over one stream, which the connection owns. Used by one thread at a time.

    After a failed receive nothing more can be received, and after a failed send nothing more can be
    sent: later calls raise the same error again. The two directions fail independently, so that
    messages which a peer sent before it went away can still be received. Errors are those of
    `Stream`, and `ValueError` for a message that is not in the catalog, of which nothing is sent.

    Attributes, besides those of `FrameReader`:
        clock: the clock that deadlines are measured with.
        spin: how a receive spins before it blocks; None blocks at once.
        bytes_sent: how many bytes the stream has taken.
    """

    def __init__(
        self,
        stream: Stream,
        catalog: Catalog,
        *,
        limits: Limits = _DEFAULT_LIMITS,
        clock: Clock | None = None,
        destination: Destination | None = None,
    ) -> None:
        super().__init__(stream, catalog, limits, destination)
        self.clock = clock or MonotonicClock()
        self.spin: SpinWait | None = None
        self.bytes_sent = 0
        self._queue = SendQueue()
        self._poller = select.poll()
        self._polled_events = 0  # the events that it waits for
        self._send_failure: WireError | None = None  # the error that every later call raises

    def __exit__(self, *exception: object) -> None:
        self.close()

    def fileno(self) -> int:
        return self.stream.fileno()

    @property
    def unsent(self) -> int:
        """How many offered bytes the system has not taken; see `flush`."""
        return self._queue.nbytes + self.stream.unsent

    def close(self) -> None:
        """Closes the stream and drops offered bytes that it has not taken. May be repeated."""
        closed = ConnectionClosed(f"the connection to {self.peer} was closed by this side")
        self._receive_failure = self._send_failure = closed
        self._queue.clear()
        self.stream.close()

    # Sending -----------------------------------------------------------------------------------

    def send(
        self,
        message: Message,
        payload: Iterable[Buffer] = (),
        *,
        sequence: int = 0,
        timeout: float,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        """Sends a message and its payload, and blocks until the stream has taken all of it.

        If both sides send more than the stream holds while neither receives, each waits for the
        other until the deadline. Use `offer` on one side to avoid that.

        Args:
            message: one of the catalog's.
            payload: C-contiguous buffers, sent one after the other.
            sequence: for the peer's reply, or of the request that this replies to.
            timeout: in seconds, for all of it.
            check: called about ten times a second while the stream has no room. What it raises ends
                the send, and nothing more can be sent.

        Raises:
            WireTimeout: the peer did not take all of it in time; nothing more can be sent.
        """
        views = self._frame(message, payload, sequence)
        rest = views if self._queue else self._write(views)
        if rest or self.stream.unsent:
            deadline = self.clock.now() + timeout
            while not self.flush():
                self._wait_to_send(deadline, timeout, check)
            while rest and (rest := self._write(rest)):
                self._wait_to_send(deadline, timeout, check)
            while not self.flush():
                self._wait_to_send(deadline, timeout, check)

    def offer(self, message: Message, payload: Iterable[Buffer] = (), *, sequence: int = 0) -> bool:
        """Sends what the stream takes now and keeps a copy of the rest for `flush`. Never blocks.

        The payload's memory may be changed as soon as the call returns. Frames are sent in the
        order in which they are offered. A `SharedPayload` is copied once for all connections that
        keep the rest of it. Returns whether the stream has taken all so far.
        """
        views = self._frame(message, payload, sequence)
        rest = views if self._queue and not self.flush() else self._write(views)
        if rest:
            if isinstance(payload, SharedPayload) and self.lending is None:
                self._queue.append(rest, payload)
            else:
                self._queue.append(rest)
        return not self.unsent

    def flush(self) -> bool:
        """Sends more of what was offered; returns whether nothing is left."""
        if self._send_failure is not None:
            raise again(self._send_failure)
        if self._queue:
            front = self._queue.front()
            before = self.bytes_sent
            rest = self._write(front)
            self._queue.written(front, rest, self.bytes_sent - before)
        try:
            return self.stream.flush() and not self._queue
        except WireError as error:
            self._send_failed(error)
            raise

    def _frame(
        self, message: Message, payload: Iterable[Buffer], sequence: int
    ) -> list[memoryview]:
        """Returns the next frame as views of its bytes."""
        if self._send_failure is not None:
            raise again(self._send_failure)
        metadata = self.catalog.encode(message)
        if self.lending is not None and (carried := self.lending.carry(payload)):
            header = pack_header(message.kind, len(metadata), carried, sequence, lent=True)
            return _head(header, metadata)
        views: list[memoryview] = []
        length = 0
        for buffer in payload:
            view = memoryview(buffer)
            if size := view.nbytes:
                flat = view.format == "B" and view.ndim == 1
                views.append(view if flat else view.cast("B"))
                length += size
        header = pack_header(message.kind, len(metadata), length, sequence)
        return _head(header, metadata) + views

    def _write(self, views: list[memoryview]) -> list[memoryview]:
        """Writes what the stream takes, once; returns what is left."""
        try:
            count = self.stream.write(views)
        except WireError as error:
            self._send_failed(error)
            raise
        self.bytes_sent += count
        return [] if count == sum(map(len, views)) else skip_bytes(views, count)

    def _wait_to_send(self, deadline: float, timeout: float, check: Callable[[], object]) -> None:
        left = deadline - self.clock.now()
        try:
            while not self._wait(select.POLLOUT, min(_CHECK_SECONDS, left)):
                check()
                left = min(left - _CHECK_SECONDS, deadline - self.clock.now())
                if left <= 0:
                    raise WireTimeout(
                        f"{self.peer} did not take what was sent to it within {timeout:g} s: it "
                        "hangs"
                    )
        except BaseException as error:
            self._send_failed(ConnectionBroken(f"an earlier send was given up: {error}"))
            raise

    def _send_failed(self, failure: WireError) -> None:
        self._send_failure = failure
        self._queue.clear()

    # Receiving ---------------------------------------------------------------------------------

    def receive(self, *, timeout: float) -> Incoming:
        """Blocks until a complete message has arrived; sends meanwhile what was offered.

        Raises:
            WireTimeout: no complete message came in time. The part that came is kept, and the next
                receive continues from there.
            FrameError: as `poll`.
        """
        if self._receive_failure is not None:
            raise again(self._receive_failure)
        deadline = self.clock.now() + timeout
        # Waiting first is cheaper than a read in vain: mostly nothing has come yet.
        ready = self.buffered or timeout <= 0 or self._wait(select.POLLIN, timeout)
        while ready:
            if self.unsent:
                with suppress(WireError):  # a failed send does not affect the receive
                    self.flush()
            incoming = self.poll()
            if incoming is not None:
                return incoming
            ready = self._wait(select.POLLIN, deadline - self.clock.now())
        raise WireTimeout(f"{self.peer} sent no complete message within {timeout:g} s")

    def _wait(self, events: int, seconds: float) -> bool:
        """Waits until the stream is ready; returns whether it is, within that time."""
        if events == select.POLLIN and self.stream.pending:
            return True
        if seconds <= 0:
            return False
        if self.unsent:
            events |= select.POLLOUT
        if events != self._polled_events:
            self._polled_events = events
            self._poller.register(self.stream.fileno(), events)
        if self.spin is not None:
            return self.spin.wait(self._poller.poll, seconds, look=events == select.POLLIN)
        return bool(self._poller.poll(math.ceil(seconds * 1000)))


def _head(header: bytes, metadata: bytes) -> list[memoryview]:
    """Returns the views of a header and its metadata: one, unless that copies much."""
    if len(metadata) < _COPIED_BYTES:
        return [memoryview(header + metadata)]
    return [memoryview(header), memoryview(metadata)]


class SharedPayload(tuple[memoryview, ...]):
    """A payload for several connections, which share the copy of what their streams do not take.

    When its memory has changed, make another one. `kept` is the copy of its end, in pieces, as much
    as some connection has needed.
    """

    kept: Sequence[memoryview] = ()

    def end(self, views: Sequence[memoryview]) -> list[memoryview]:
        """Returns a copy of its end, which `views` are."""
        missing = sum(map(len, views)) - sum(map(len, self.kept))
        if missing <= 0:
            return skip_bytes([*self.kept], -missing)
        first = list[memoryview]()
        for view in views:
            if missing <= 0:
                break
            first.append(view[:missing])
            missing -= len(first[-1])
        self.kept = (memoryview(b"".join(first)), *self.kept)
        return [*self.kept]


class SendQueue:
    """The bytes that a connection has to send and its stream has not taken yet: copies, in order.

    The memory of the last large copy is kept for the next one: new pages each time would take
    longer than the copy itself.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._pieces: deque[memoryview] = deque()
        self._reused = bytearray()

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def append(self, views: list[memoryview], payload: SharedPayload | None = None) -> None:
        """Adds a copy of what is left of a frame, with its payload if others share the copy."""
        size = sum(map(len, views))
        if payload is not None:
            of_head, first = size - sum(map(len, payload)), 0
            while of_head > 0:  # the payload begins a view of its own
                self._pieces.append(memoryview(bytes(views[first])))
                of_head -= len(views[first])
                first += 1
            self._pieces += payload.end(views[first:])
            self.nbytes += size
            return
        if self._pieces or size < _REUSED_BYTES:
            copy = memoryview(b"".join(views))
        else:  # the reused memory is free, as nothing is queued
            if len(self._reused) < size:
                self._reused = bytearray(size)
            copy = memoryview(self._reused)[:size]
            offset = 0
            for view in views:
                copy[offset : offset + len(view)] = view
                offset += len(view)
        self._pieces.append(copy)
        self.nbytes += size

    def front(self) -> list[memoryview]:
        """Returns the first pieces, to be written together."""
        return list(islice(self._pieces, _FRONT_PIECES))

    def written(self, front: list[memoryview], rest: list[memoryview], count: int) -> None:
        """Removes `count` bytes, of which `rest` is left of what `front` returned."""
        self.nbytes -= count
        for _ in range(len(front) - len(rest)):
            self._pieces.popleft()
        if rest:
            self._pieces[0] = rest[0]

    def clear(self) -> None:
        """Drops all pieces and the reused memory."""
        self._pieces.clear()
        self.nbytes = 0
        self._reused = bytearray()
