"""Typed messages with payloads over a `Stream`: blocking for workers, non-blocking for servers.

Nothing of a payload is copied on the way out, except what `offer` has to keep, and nothing on the
way in, except what came in one read with the header: payloads are written from, and read into,
the caller's own memory.
"""

from __future__ import annotations

import math
import select
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Self

from trireme.clock import Clock, MonotonicClock
from trireme.errors import (
    ConnectionBroken,
    ConnectionClosed,
    FrameError,
    PeerClosed,
    WireError,
    WireTimeout,
)
from trireme.wire.message import (
    HEADER_SIZE,
    Catalog,
    Header,
    Limits,
    Message,
    pack_header,
    unpack_header,
)
from trireme.wire.sockets import IOV_MAX
from trireme.wire.transport import Stream

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Connection", "Destination", "Incoming"]

Destination = Callable[[Message, int], Sequence[memoryview]]
"""Says where a payload of so many bytes, which belongs to this message, shall be written."""

_READ_AHEAD = 8192  # header and metadata of nearly every message, in one read
_TURN_BYTES = 64 << 20  # what one `poll` reads at most, so that one peer cannot hold up the rest
_DEFAULT_LIMITS = Limits()


@dataclass(slots=True)
class Incoming:
    """A message that arrived.

    Attributes:
        message: the decoded metadata.
        sequence: as the sender gave it.
        payload: the memory that the destination named, now filled.
        nbytes: how long the payload is.
    """

    message: Message
    sequence: int
    payload: Sequence[memoryview]
    nbytes: int


class Connection:
    """Messages over one stream, which the connection owns. Used by one thread at a time.

    After a failed receive nothing more can be received, and after a failed send nothing more can
    be sent: later calls raise the same again. The two directions fail independently, so what a
    peer said before it went away can still be read.

    Attributes:
        catalog: the messages that may be sent and received.
        limits: the largest frame to accept.
        destination: asked where each payload that is not empty goes, before it is read, and may
            raise `FrameError` to refuse it. None allocates one `bytearray` a payload.
        peer: who is at the other end, for messages; the stream's address until somebody knows
            better.
        bytes_sent: how many bytes the stream has taken.
        bytes_received: how many bytes came from the stream.

    `catalog`, `limits` and `destination` may be replaced between two frames.
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
        self.catalog = catalog
        self.limits = limits
        self.destination = destination
        self.peer = stream.peer
        self.bytes_sent = 0
        self.bytes_received = 0
        self._stream = stream
        self._clock = clock or MonotonicClock()
        self._closed = False
        self._receive_failure: WireError | None = None
        self._send_failure: WireError | None = None
        # Bytes read and not yet understood: _ahead[_start:_stop].
        self._ahead = memoryview(bytearray(_READ_AHEAD))
        self._start = 0
        self._stop = 0
        # The frame under way: its header, its message, where its payload goes, what is missing.
        self._header: Header | None = None
        self._message: Message | None = None
        self._payload: Sequence[memoryview] = ()
        self._space: list[memoryview] = []
        self._missing = 0
        # Copies of what was offered and the stream has not taken yet.
        self._queue: deque[memoryview] = deque()
        self._unsent = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def fileno(self) -> int:
        """Returns the descriptor to wait on."""
        return self._stream.fileno()

    @property
    def wants_write(self) -> bool:
        """Whether something offered has not been taken by the stream: see `flush`."""
        return self._unsent > 0

    @property
    def unsent(self) -> int:
        """How many offered bytes the stream has not taken."""
        return self._unsent

    def close(self) -> None:
        """Closes the stream and forgets what was offered and not taken. May be repeated."""
        self._closed = True
        self._drop_queue()
        self._stream.close()

    # Sending -----------------------------------------------------------------------------------

    def send(
        self,
        message: Message,
        payload: Iterable[Buffer] = (),
        *,
        sequence: int = 0,
        timeout: float,
    ) -> None:
        """Sends a message and its payload, and blocks until the stream has taken all of it.

        Two sides that both send more than the stream holds while neither receives wait for each
        other until the deadline; `offer` on one of them avoids it.

        Args:
            message: one of the catalog's.
            payload: buffers of any shape that are C-contiguous, sent one after the other.
            sequence: for the peer's reply, or of the request that this replies to.
            timeout: in seconds, for all of it.

        Raises:
            ValueError: the message is not in the catalog. Nothing was sent.
            WireTimeout: the peer did not take all of it in time; nothing more can be sent.
            PeerClosed: the peer closed the connection.
            ConnectionBroken: the peer or the network broke off, or an earlier send failed.
            ConnectionClosed: after `close`.
        """
        self._check_send()
        views = self._frame(message, payload, sequence)
        deadline = self._clock.now() + timeout
        while self._queue and not self.flush():
            self._wait_to_send(deadline, timeout)
        rest = self._write(views)
        while rest:
            self._wait_to_send(deadline, timeout)
            rest = self._write(rest)

    def offer(
        self, message: Message, payload: Iterable[Buffer] = (), *, sequence: int = 0
    ) -> bool:
        """Sends what the stream takes now and keeps a copy of the rest for `flush`. Never blocks.

        The payload's memory may be changed as soon as the call returns. Frames offered while
        others wait are sent after them.

        Args:
            message: one of the catalog's.
            payload: buffers of any shape that are C-contiguous, sent one after the other.
            sequence: for the peer's reply, or of the request that this replies to.

        Returns:
            Whether the stream has taken everything offered so far.

        Raises:
            ValueError: the message is not in the catalog. Nothing was sent.
            PeerClosed: the peer closed the connection.
            ConnectionBroken: the peer or the network broke off, or an earlier send failed.
            ConnectionClosed: after `close`.
        """
        self._check_send()
        views = self._frame(message, payload, sequence)
        if self._queue and not self.flush():
            self._keep(views)
            return False
        rest = self._write(views)
        if rest:
            self._keep(rest)
        return not rest

    def flush(self) -> bool:
        """Goes on with what was offered. Never blocks.

        Returns:
            Whether nothing is left.

        Raises:
            PeerClosed: the peer closed the connection.
            ConnectionBroken: the peer or the network broke off, or an earlier send failed.
            ConnectionClosed: after `close`.
        """
        self._check_send()
        if self._queue:
            waiting = list(islice(self._queue, IOV_MAX))
            before = self.bytes_sent
            rest = self._write(waiting)
            self._unsent -= self.bytes_sent - before
            for _ in range(len(waiting) - len(rest)):
                self._queue.popleft()
            if rest:
                self._queue[0] = rest[0]
        return not self._queue

    def _frame(
        self, message: Message, payload: Iterable[Buffer], sequence: int
    ) -> list[memoryview]:
        metadata = self.catalog.encode(message)
        views = [view for buffer in payload if (view := memoryview(buffer)).nbytes]
        views = [
            view if view.ndim == 1 and view.format == "B" else view.cast("B") for view in views
        ]
        length = sum(map(len, views))
        header = pack_header(Header(message.kind, len(metadata), length, sequence))
        return [memoryview(header + metadata), *views]

    def _write(self, views: list[memoryview]) -> list[memoryview]:
        """Writes until the stream takes no more; returns what is left."""
        try:
            while views:
                count = self._stream.write(views if len(views) <= IOV_MAX else views[:IOV_MAX])
                if count == 0:
                    break
                self.bytes_sent += count
                views = _after(views, count)
        except WireError as error:
            self._send_failed(error)
            raise
        return views

    def _keep(self, views: list[memoryview]) -> None:
        copy = memoryview(b"".join(views))
        self._queue.append(copy)
        self._unsent += len(copy)

    def _wait_to_send(self, deadline: float, timeout: float) -> None:
        if not self._wait(select.POLLOUT, deadline):
            error = f"{self.peer} did not take what was sent to it within {timeout:g} s: it hangs"
            self._send_failed(ConnectionBroken(f"an earlier send was given up: {error}"))
            raise WireTimeout(error)

    def _send_failed(self, failure: WireError) -> None:
        self._send_failure = failure
        self._drop_queue()

    def _drop_queue(self) -> None:
        self._queue.clear()
        self._unsent = 0

    def _check_send(self) -> None:
        if self._closed:
            raise ConnectionClosed(f"the connection to {self.peer} was closed by this side")
        if self._send_failure is not None:
            raise type(self._send_failure)(str(self._send_failure))

    # Receiving ---------------------------------------------------------------------------------

    def receive(self, *, timeout: float) -> Incoming:
        """Blocks until a message with all its payload is there. Meanwhile it sends what `offer`
        had to leave.

        Raises:
            WireTimeout: it did not come in time. The connection is still good: what has come is
                kept, and the next receive goes on from there.
            FrameError: what came is not a frame of this conversation, or was refused.
            PeerClosed: the peer closed the connection between two frames.
            ConnectionBroken: the peer or the network broke off.
            ConnectionClosed: after `close`.
        """
        incoming = self.poll()
        if incoming is not None:
            return incoming
        deadline = self._clock.now() + timeout
        while self._wait(select.POLLIN, deadline):
            self._flush_aside()
            incoming = self.poll()
            if incoming is not None:
                return incoming
        raise WireTimeout(f"{self.peer} sent no complete message within {timeout:g} s")

    def poll(self) -> Incoming | None:
        """Returns a message if a whole one is there. Never blocks.

        Messages may be there already when the descriptor is not readable: who waits on it first
        calls this until it returns None.

        Raises:
            FrameError: what came is not a frame of this conversation, or was refused.
            PeerClosed: the peer closed the connection between two frames.
            ConnectionBroken: the peer or the network broke off.
            ConnectionClosed: after `close`.
        """
        if self._closed:
            raise ConnectionClosed(f"the connection to {self.peer} was closed by this side")
        if self._receive_failure is not None:
            raise type(self._receive_failure)(str(self._receive_failure))
        try:
            if self._message is None and not self._read_message():
                return None
            if self._missing and not self._read_payload():
                return None
        except WireError as error:
            self._receive_failure = error
            raise
        return self._finish()

    def _read_message(self) -> bool:
        """Reads a header and its metadata; returns whether they are there."""
        while True:
            have = self._stop - self._start
            if self._header is None and have >= HEADER_SIZE:
                end = self._start + HEADER_SIZE
                self._header = unpack_header(self._ahead[self._start : end], self.limits)
            need = HEADER_SIZE
            if self._header is not None:
                need += self._header.metadata_length
                if have >= need:
                    self._understand(self._header, need)
                    return True
            if not self._read_ahead(need):
                return False

    def _read_ahead(self, need: int) -> bool:
        """Reads into the buffer, in which a frame's first `need` bytes shall have room."""
        if self._start == self._stop:
            self._start = self._stop = 0
        elif len(self._ahead) - self._start < need:
            self._make_room(need)
        count = self._read([self._ahead[self._stop :]])
        self._stop += count
        return count > 0

    def _make_room(self, need: int) -> None:
        """Moves what is there to the front, of a larger buffer if it is full.

        It grows with what has come, not with what was announced: announcing is free.
        """
        have = self._stop - self._start
        ahead = self._ahead
        if have == len(ahead):
            ahead = memoryview(bytearray(min(2 * have, need)))
        ahead[:have] = bytes(self._ahead[self._start : self._stop])
        self._ahead, self._start, self._stop = ahead, 0, have

    def _understand(self, header: Header, length: int) -> None:
        """Decodes the metadata and prepares for the payload."""
        metadata = self._ahead[self._start + HEADER_SIZE : self._start + length]
        message = self.catalog.decode(header.kind, metadata)
        if header.payload_length:
            self._payload = self._place(message, header.payload_length)
            self._space = [view for view in map(_bytes_view, self._payload) if len(view)]
        self._missing = header.payload_length
        self._message = message
        self._start += length
        if self._missing and self._start < self._stop:
            self._take_from_ahead()
        elif len(self._ahead) > _READ_AHEAD and self._start == self._stop:
            self._ahead = memoryview(bytearray(_READ_AHEAD))
            self._start = self._stop = 0

    def _place(self, message: Message, length: int) -> Sequence[memoryview]:
        try:
            if self.destination is None:
                return (memoryview(bytearray(length)),)
            payload = self.destination(message, length)
        except MemoryError as error:
            raise FrameError(
                f"{self.peer} announced a payload of {length} bytes, for which there is no memory"
            ) from error
        room = sum(view.nbytes for view in payload)
        if room != length:
            raise FrameError(
                f"{self.peer} sends {length} bytes with {type(message).__name__}, and there is "
                f"room for {room}: the two sides disagree on what it holds"
            )
        return payload

    def _take_from_ahead(self) -> None:
        count = min(self._missing, self._stop - self._start)
        end = self._start + count
        self._missing -= count
        while self._start < end:
            view = self._space[0]
            piece = min(len(view), end - self._start)
            view[:piece] = self._ahead[self._start : self._start + piece]
            self._start += piece
            self._space = _after(self._space, piece)

    def _read_payload(self) -> bool:
        """Reads into the payload's own memory; returns whether it is full."""
        turn = _TURN_BYTES
        while turn > 0:
            count = self._read(self._space)
            if count == 0:
                return False
            turn -= count
            self._missing -= count
            if self._missing == 0:
                return True
            self._space = _after(self._space, count)
        return False

    def _read(self, buffers: list[memoryview]) -> int:
        try:
            count = self._stream.read_into(buffers)
        except PeerClosed as error:
            if self._header is None and self._start == self._stop:
                raise
            raise ConnectionBroken(
                f"{self.peer} closed the connection in the middle of a message"
            ) from error
        self.bytes_received += count
        return count

    def _finish(self) -> Incoming:
        assert self._header is not None and self._message is not None
        incoming = Incoming(
            self._message, self._header.sequence, self._payload, self._header.payload_length
        )
        self._header = self._message = None
        self._payload, self._space = (), []
        return incoming

    def _flush_aside(self) -> None:
        """Flushes on the side of a receive, which a failed send does not concern."""
        if self._unsent:
            with suppress(WireError):
                self.flush()

    # Waiting -----------------------------------------------------------------------------------

    def _wait(self, events: int, deadline: float) -> bool:
        """Waits until the stream is ready or the deadline has passed; returns whether it is."""
        seconds = deadline - self._clock.now()
        if seconds <= 0:
            return False
        if self._unsent:
            events |= select.POLLOUT
        poller = select.poll()
        poller.register(self._stream.fileno(), events)
        ready = poller.poll(math.ceil(seconds * 1000))
        return bool(ready)


def _bytes_view(buffer: Buffer) -> memoryview:
    view = memoryview(buffer)
    if view.ndim == 1 and view.format == "B":
        return view
    return view.cast("B")


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """Returns what comes after the first `count` bytes."""
    index = 0
    while index < len(views) and count >= len(views[index]):
        count -= len(views[index])
        index += 1
    rest = views[index:]
    if count:
        rest[0] = rest[0][count:]
    return rest
