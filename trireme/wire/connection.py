"""Typed messages with payloads over a `Stream`: blocking for workers, non-blocking for servers.

Payloads are written from, and read into, the memory where they belong. Only `offer` copies what the
stream does not take at once, and a reader copies what came in one read with the header.
"""

from __future__ import annotations

import math
import select
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING

import msgspec

from trireme.errors import (
    ConnectionBroken,
    ConnectionClosed,
    FrameError,
    PeerClosed,
    ProtocolMismatch,
    WireError,
    WireTimeout,
)
from trireme.wire.clock import Clock, MonotonicClock
from trireme.wire.message import (
    HEADER_SIZE,
    Catalog,
    Header,
    Limits,
    Message,
    pack_header,
    unpack_header,
)
from trireme.wire.polling import SpinWait
from trireme.wire.shared_memory import Lending
from trireme.wire.transport import Stream

if TYPE_CHECKING:
    from typing_extensions import Buffer

Destination = Callable[[Message, int], Sequence[memoryview]]
"""Returns the memory for a payload, from the message that it belongs to and its length in bytes."""

_DEFAULT_LIMITS = Limits()
_COPIED_BYTES = 1 << 16  # metadata of fewer is copied behind its header, to be one view
_REUSED_BYTES = 1 << 20  # copies of at least this size use one memory, one after the other
_PIECES = 1024  # how many queued pieces are written at once
_CHECK_SECONDS = 0.1  # at most, between two checks while a send waits
_READ_AHEAD = 1024  # header and metadata of nearly every message, in one read
_TLS_ALERT = b"\x15\x03"  # if that is all that comes, a listener has answered plain text
_GROWS_FASTER = 1 << 16  # from so many bytes of metadata on the buffer grows eightfold


class Incoming(msgspec.Struct):
    """A message that arrived, and its payload."""

    message: Message
    sequence: int
    payload: Sequence[memoryview]
    nbytes: int


class SharedPayload(tuple[memoryview, ...]):
    """A payload for several connections, which share a copy where their streams do not take it."""

    kept = memoryview(b"")

    def end(self, nbytes: int) -> memoryview:
        if not self.kept:
            self.kept = memoryview(b"".join(self))
        return self.kept[len(self.kept) - nbytes :]


class Connection(AbstractContextManager["Connection", None]):
    """Messages over one stream, which the connection owns. Used by one thread at a time.

    The two directions fail independently, and each later call raises the same error again: what a
    peer sent before it went away can still be received.
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
        self.stream = stream
        # The next four may be replaced between two frames.
        self.catalog = catalog  # the messages that may be sent and received
        self.limits = limits  # the largest frame that is accepted
        # Called for each payload that is not empty, before it is read, to get the memory for it. It
        # may raise `FrameError` to refuse the payload. None allocates a `bytearray`.
        self.destination = destination
        self.lending: Lending | None = None  # memory that both sides share
        self.peer = stream.peer  # the name of the other end, for messages
        self.clock = clock or MonotonicClock()  # that deadlines are measured with
        self.spin: SpinWait | None = None  # how a receive spins before it blocks; None for not
        self.bytes_sent = self.bytes_received = 0  # that the stream has taken and brought
        self._poller = select.poll()
        self._polled_events = 0  # the events that it waits for
        # The errors that every later call raises.
        self._send_failure: WireError | None = None
        self._receive_failure: WireError | None = None
        # What the stream has not taken: all but what a `send` waits with are copies.
        self._queue: list[memoryview] = []
        self._queued = 0  # its bytes
        # The memory of the last large copy, for the next one: new pages take longer than the copy.
        self._reused = bytearray()
        # The bytes that were read and not decoded yet are _buffer[_start:_stop]. When there are
        # none, the next read goes into _first_read. Where payloads follow, that is only as long as
        # the last header and metadata were, so that the payload need not be copied from here.
        self._buffer = memoryview(bytearray(_READ_AHEAD))
        self._first_read = self._buffer
        self._start = self._stop = 0
        # The current frame: how much of it the buffer must hold next, its header until the
        # metadata is decoded, then the message, and how much of its payload is missing and where
        # that goes.
        self._need = HEADER_SIZE
        self._header: Header | None = None
        self._incoming: Incoming | None = None
        self._missing = 0
        self._space: list[memoryview] = []

    def __exit__(self, *exception: object) -> None:
        self.close()

    def fileno(self) -> int:
        return self.stream.fileno()

    @property
    def unsent(self) -> int:
        return self._queued + self.stream.unsent

    @property
    def buffered(self) -> bool:
        """Whether bytes of further messages were read, of which the descriptor will not tell."""
        return self._start != self._stop or self.stream.pending

    def close(self) -> None:
        """Closes the stream, and drops what it has not taken. May be repeated."""
        closed = ConnectionClosed(f"the connection to {self.peer} was closed by this side")
        self._receive_failure = closed
        self._send_failed(closed)
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
        """Sends a message, and blocks until the stream has taken all of it.

        Two sides that both send more than the stream holds, and do not receive, wait for each other
        until the deadline. `check` is called about ten times a second meanwhile.
        """
        if not self.offer(message, payload, sequence=sequence, copies=False):
            self.drain(timeout=timeout, check=check)

    def drain(self, *, timeout: float, check: Callable[[], object] = lambda: None) -> None:
        """Blocks until the stream has taken all that was offered; see `send`."""
        deadline = self.clock.now() + timeout
        self._wait_to_send(deadline, timeout, check)
        while not self.flush():
            self._wait_to_send(deadline, timeout, check)

    def offer(
        self,
        message: Message,
        payload: Iterable[Buffer] = (),
        *,
        sequence: int = 0,
        copies: bool = True,
    ) -> bool:
        """Sends what the stream takes now, and keeps a copy of the rest for `flush`. Never blocks.

        The payload's memory may be changed as soon as the call returns, unless it is not copied:
        then `drain` must follow. Returns whether the stream has taken all so far.
        """
        views = self._frame(message, payload, sequence)
        self._queue += views
        if self.flush():
            return True
        if copies and (left := min(len(views), len(self._queue))):
            self._queue[-left:] = self._copied(self._queue[-left:], payload)
        return False

    def flush(self) -> bool:
        """Sends more of what was offered; returns whether nothing is left."""
        if self._send_failure is not None:
            raise again(self._send_failure)
        try:
            if self._queue:
                front = self._queue[:_PIECES]
                count = self.stream.write(front)
                self.bytes_sent += count
                self._queued -= count
                self._queue[:_PIECES] = _skip_bytes(front, count)
            return self.stream.flush() and not self._queue
        except WireError as error:
            self._send_failed(error)
            raise

    def _frame(
        self, message: Message, payload: Iterable[Buffer], sequence: int
    ) -> list[memoryview]:
        """Returns the next frame, which counts as queued."""
        if self._send_failure is not None:
            raise again(self._send_failure)
        metadata = self.catalog.encode(message)
        views: list[memoryview] = []
        length = carried = 0
        if self.lending is not None:
            carried = self.lending.carry(payload)
        if not carried:
            views, length = _flat(payload)
        header = pack_header(
            message.kind, len(metadata), carried or length, sequence, lent=carried > 0
        )
        self._queued += HEADER_SIZE + len(metadata) + length
        if len(metadata) < _COPIED_BYTES:
            return [memoryview(header + metadata), *views]
        return [memoryview(header), memoryview(metadata), *views]

    def _copied(self, views: list[memoryview], payload: Iterable[Buffer]) -> list[memoryview]:
        if isinstance(payload, SharedPayload) and self.lending is None:
            first = max(0, len(views) - len(payload))
            head = [memoryview(bytes(view)) for view in views[:first]]
            return [*head, payload.end(sum(map(len, views[first:])))]
        size = sum(map(len, views))
        if size < _REUSED_BYTES or len(self._queue) > len(views):
            return [memoryview(b"".join(views))]
        if len(self._reused) < size:  # it is free, as nothing else is queued
            self._reused = bytearray(size)
        copy, offset = memoryview(self._reused)[:size], 0
        for view in views:
            copy[offset : offset + len(view)] = view
            offset += len(view)
        return [copy]

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
        self._queue, self._queued, self._reused = [], 0, bytearray()

    # Receiving ---------------------------------------------------------------------------------

    def receive(self, *, timeout: float) -> Incoming:
        """Blocks until a complete message has arrived; sends meanwhile what was offered.

        Raises:
            WireTimeout: none came in time. The next receive goes on with the part that came.
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

    def wait(self, seconds: float) -> bool:
        return self._wait(select.POLLIN, seconds)

    def _wait(self, events: int, seconds: float) -> bool:
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

    def poll(self) -> Incoming | None:
        """Returns a message if a complete one is there. Never blocks, and reads a bounded amount.

        Before you wait on the descriptor, call this until it returns None or nothing is buffered.
        """
        if self._receive_failure is not None:
            raise again(self._receive_failure)
        try:
            if self._incoming is None:
                if self._stop - self._start < self._need:
                    count = self.stream.read_into([self._room()])
                    self._stop += count
                    self.bytes_received += count
                if not self._decode():
                    return None
            if self._missing:
                count = self.stream.read_into(self._space)
                self.bytes_received += count
                self._missing -= count
                if self._missing:
                    self._space = _skip_bytes(self._space, count)
                    return None
                self._space = []
        except WireError as error:
            self._receive_failure = failure = self._explained(error)
            raise failure from error
        incoming, self._incoming = self._incoming, None
        return incoming

    def _explained(self, error: WireError) -> WireError:
        """Returns the error of a failed receive, with what the bytes so far say of it."""
        came = bytes(self._buffer[self._start : self._stop])
        if self._header is None and len(came) < HEADER_SIZE and came[:2] == _TLS_ALERT:
            return ProtocolMismatch(
                f"{self.peer} speaks TLS only, and this task in plain text: give it its "
                "certificate (`trireme certs issue`, and --certs)"
            )
        if isinstance(error, PeerClosed) and (self._incoming is not None or self.buffered):
            return ConnectionBroken(f"{self.peer} closed the connection inside a message")
        if isinstance(error, FrameError) and not str(error).startswith(self.peer):
            return type(error)(f"{self.peer}: {error}")
        return error

    def _room(self) -> memoryview:
        """Returns where to read more of a header and its metadata.

        The buffer grows with the bytes that came: a peer may announce any length.
        """
        have, buffer = self._stop - self._start, self._buffer
        if not have:
            self._start = self._stop = 0
            return self._first_read
        if len(buffer) - self._start < self._need:
            if have == len(buffer):
                factor = 2 if have < _GROWS_FASTER else 8
                buffer = memoryview(bytearray(min(factor * have, self._need)))
            buffer[:have] = bytes(self._buffer[self._start : self._stop])  # places may overlap
            self._buffer = self._first_read = buffer
            self._start, self._stop = 0, have
        return buffer[self._stop :]

    def _decode(self) -> bool:
        if self._stop - self._start < self._need:
            return False
        header = self._header
        if header is None:
            header = self._header = unpack_header(self._buffer, self.limits, self._start)
            self._need += header.metadata_length
            if self._stop - self._start < self._need:
                return False
        end = self._start + self._need
        message = self.catalog.decode(header.kind, self._buffer[self._start + HEADER_SIZE : end])
        payload = self._payload(message, header)
        self._incoming = Incoming(message, header.sequence, payload, header.payload_length)
        self._header = None
        self._start = end
        if self._missing:
            if end != self._stop:
                self._first_read = self._buffer[: self._need]
                self._take_from_buffer()
        else:  # reads ahead as far as usual again, and frees a buffer that has grown
            if len(self._buffer) > _READ_AHEAD and end == self._stop:
                self._buffer = memoryview(bytearray(_READ_AHEAD))
            self._first_read = self._buffer
        self._need = HEADER_SIZE
        return True

    def _payload(self, message: Message, header: Header) -> Sequence[memoryview]:
        """Returns the memory for a payload, which is missing, or lies there already."""
        length = header.payload_length
        if header.lent:
            if self.lending is None or length != self.lending.incoming_bytes:
                raise FrameError(f"{length} bytes lie in lent memory, and none such was lent")
            return self.lending.incoming
        if not length:
            return ()
        try:
            if self.destination is None:
                payload: Sequence[memoryview] = (memoryview(bytearray(length)),)
            else:
                payload = self.destination(message, length)
        except MemoryError as error:
            raise FrameError(
                f"a payload of {length} bytes is announced, for which there is no memory"
            ) from error
        self._space, room = _flat(payload)
        if room != length:
            raise FrameError(
                f"{length} bytes come with {type(message).__name__}, and there is room for {room}: "
                "the two sides disagree on what it holds"
            )
        self._missing = length
        return payload

    def _take_from_buffer(self) -> None:
        while self._missing and self._start != self._stop:
            view = self._space[0]
            count = min(len(view), self._stop - self._start)
            view[:count] = self._buffer[self._start : self._start + count]
            self._start += count
            self._missing -= count
            self._space = _skip_bytes(self._space, count)


def _flat(payload: Iterable[Buffer]) -> tuple[list[memoryview], int]:
    """Returns views of the bytes of buffers that are not empty, and how many these are."""
    views, length = list[memoryview](), 0
    for buffer in payload:
        view = memoryview(buffer)
        if size := view.nbytes:
            flat = view.format == "B" and view.ndim == 1 and view.contiguous
            views.append(view if flat else view.cast("B"))
            length += size
    return views, length


def _skip_bytes(views: list[memoryview], count: int) -> list[memoryview]:
    for index, view in enumerate(views):
        size = len(view)
        if count < size:
            return [view[count:], *views[index + 1 :]]
        count -= size
    return []


def again(failure: WireError) -> WireError:
    """Returns a copy of an error, without the first one's traceback."""
    return type(failure)(str(failure))
