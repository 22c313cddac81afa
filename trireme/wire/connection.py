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
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Self

import msgspec

from trireme.clock import Clock, MonotonicClock
from trireme.errors import (
    ConnectionBroken,
    ConnectionClosed,
    FrameError,
    PeerClosed,
    WireError,
    WireTimeout,
)
from trireme.wire.lending import Lending
from trireme.wire.message import (
    HEADER_SIZE,
    Catalog,
    Header,
    Limits,
    Message,
    pack_header,
    unpack_header,
)
from trireme.wire.spin import Spin
from trireme.wire.transport import Stream

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Connection", "Destination", "Incoming"]

Destination = Callable[[Message, int], Sequence[memoryview]]
"""Says where a payload of so many bytes, which belongs to this message, shall be written."""

_READ_AHEAD = 1024  # header and metadata of nearly every message, in one read
_KEPT_BYTES = 1 << 20  # copies of at least this size share one memory, one after the other
_FLUSH_PIECES = 64  # how many queued frames are written at once
_DEFAULT_LIMITS = Limits()
_NOTHING = memoryview(b"")


class Incoming(msgspec.Struct):
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
        lending: memory that both sides see; payloads that lie there do not cross the stream.
        clock: what the deadlines are measured with.
        spin: how a receive waits: it looks again and again for what has not come, before it sleeps.
            None sleeps at once. To be woken takes some ten microseconds, which is much where the
            answer takes a hundred.
        peer: who is at the other end, for messages; the stream's address until somebody knows
            better.
        unsent: how many offered bytes the stream has not taken.
        bytes_sent: how many bytes the stream has taken.
        bytes_received: how many bytes came from the stream.

    `catalog`, `limits`, `destination` and `lending` may be replaced between two frames.
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
        self.lending: Lending | None = None
        self.clock = clock or MonotonicClock()
        self.spin: Spin | None = None
        self.peer = stream.peer
        self.bytes_sent = 0
        self.bytes_received = 0
        self._stream = stream
        self._poller = select.poll()
        self._polled = 0  # the events that it waits for
        # What every later call in that direction raises.
        self._receive_failure: WireError | None = None
        self._send_failure: WireError | None = None
        # Bytes read and not yet understood: _ahead[_start:_stop]. When there are none, the next
        # read is into _first: where payloads follow, only as much as the last one's header and
        # metadata took, so that the payload need not be copied from here.
        self._ahead = memoryview(bytearray(_READ_AHEAD))
        self._first = self._ahead
        self._start = 0
        self._stop = 0
        # The frame under way: how much of it to have in there, its header until the metadata is
        # understood, then the message, how much of its payload is missing and where that goes.
        self._need = HEADER_SIZE
        self._header: Header | None = None
        self._incoming: Incoming | None = None
        self._missing = 0
        self._space: list[memoryview] = []
        # Copies of what was offered and the stream has not taken yet; the last large one's memory
        # is kept for the next: pages that are new each time take longer than the copy itself.
        self._queue: deque[memoryview] = deque()
        self.unsent = 0
        self._kept = bytearray()
        # The frame that `begin` has opened: what it was given and the stream has not taken, and
        # how many bytes it was not given yet.
        self._given: list[memoryview] = []
        self._due = 0

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
        return self.unsent > 0

    @property
    def buffered(self) -> bool:
        """Whether bytes were read that belong to messages not yet returned.

        If not, the descriptor becomes readable before the next message can be there.
        """
        return self._start != self._stop

    @property
    def stream(self) -> Stream:
        """The stream below, for what only one transport has."""
        return self._stream

    def close(self) -> None:
        """Closes the stream and forgets what was offered and not taken. May be repeated."""
        closed = ConnectionClosed(f"the connection to {self.peer} was closed by this side")
        self._receive_failure = self._send_failure = closed
        self._drop_queue()
        self._kept = bytearray()
        self._given, self._due = [], 0
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
        if self._send_failure is not None:
            raise _again(self._send_failure)
        if self._given or self._due:
            self._must_be_between_frames()
        views = self._frame(message, payload, sequence)
        rest = views if self._queue else self._write(views)
        if rest:
            self._send_rest(rest, timeout)

    def offer(self, message: Message, payload: Iterable[Buffer] = (), *, sequence: int = 0) -> bool:
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
        if self._send_failure is not None:
            raise _again(self._send_failure)
        if self._given or self._due:
            self._must_be_between_frames()
        views = self._frame(message, payload, sequence)
        rest = views if self._queue and not self.flush() else self._write(views)
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
        if self._send_failure is not None:
            raise _again(self._send_failure)
        if self._queue:
            waiting = list(islice(self._queue, _FLUSH_PIECES))
            before = self.bytes_sent
            rest = self._write(waiting)
            self.unsent -= self.bytes_sent - before
            for _ in range(len(waiting) - len(rest)):
                self._queue.popleft()
            if rest:
                self._queue[0] = rest[0]
        return not self._queue

    # A frame in pieces ---------------------------------------------------------------------------

    @property
    def in_frame(self) -> bool:
        """Whether a frame was begun and not all of it has gone out."""
        return bool(self._given or self._due)

    def begin(self, message: Message, length: int, *, sequence: int = 0) -> None:
        """Opens a frame whose payload is given later, by `extend`. Sends nothing yet.

        Until all of it has gone out nothing else can be sent. A frame that cannot be completed is
        taken back by closing the connection: the peer takes no notice of a part of one.

        Args:
            message: one of the catalog's.
            length: of the payload, in bytes.
            sequence: for the peer's reply, or of the request that this replies to.

        Raises:
            ValueError: the message is not in the catalog, or something else is not sent yet.
        """
        self._must_be_between_frames()
        if self._queue:
            raise ValueError(f"what was offered to {self.peer} before is not sent yet")
        metadata = self.catalog.encode(message)
        header = pack_header(message.kind, len(metadata), length, sequence)
        self._given = [memoryview(header + metadata)]
        self._due = length

    def extend(self, payload: Iterable[memoryview]) -> None:
        """Gives more of the payload of the frame that `begin` has opened.

        Args:
            payload: views of bytes, which must not change before they have gone out.

        Raises:
            ValueError: that is more than was announced. Nothing was taken.
        """
        views = [view for view in payload if view.nbytes]
        size = sum(map(len, views))
        if size > self._due:
            raise ValueError(f"a frame to {self.peer} wants {self._due} bytes and is given {size}")
        self._given += views
        self._due -= size

    def advance(self) -> bool:
        """Sends what the stream takes now of the frame that `begin` has opened. Never blocks.

        Returns:
            Whether it has taken all that was given.

        Raises:
            PeerClosed: the peer closed the connection.
            ConnectionBroken: the peer or the network broke off, or an earlier send failed.
            ConnectionClosed: after `close`.
        """
        if self._send_failure is not None:
            raise _again(self._send_failure)
        if self._given:
            self._given = self._write(self._given)
        return not self._given

    def _must_be_between_frames(self) -> None:
        if self.in_frame:
            raise ValueError(f"a frame to {self.peer} was begun and is not complete")

    def _frame(
        self, message: Message, payload: Iterable[Buffer], sequence: int
    ) -> list[memoryview]:
        metadata = self.catalog.encode(message)
        if self.lending is not None and (carried := self.lending.carry(payload)):
            header = pack_header(message.kind, len(metadata), carried, sequence, lent=True)
            return [memoryview(header + metadata)]
        views: list[memoryview] = [_NOTHING]
        length = 0
        for buffer in payload:
            view = memoryview(buffer)
            if size := view.nbytes:
                flat = view.format == "B" and view.ndim == 1
                views.append(view if flat else view.cast("B"))
                length += size
        header = pack_header(message.kind, len(metadata), length, sequence)
        views[0] = memoryview(header + metadata)
        return views

    def _write(self, views: list[memoryview]) -> list[memoryview]:
        """Writes what the stream takes, once; returns what is left."""
        try:
            count = self._stream.write(views)
        except WireError as error:
            self._send_failed(error)
            raise
        self.bytes_sent += count
        return [] if count == sum(map(len, views)) else _after(views, count)

    def _send_rest(self, rest: list[memoryview], timeout: float) -> None:
        """Sends what was offered before and then the rest of a frame, waiting where it must."""
        deadline = self.clock.now() + timeout
        while not self.flush():
            self._wait_to_send(deadline, timeout)
        while rest := self._write(rest):
            self._wait_to_send(deadline, timeout)

    def _keep(self, views: list[memoryview]) -> None:
        size = sum(map(len, views))
        if self._queue or size < _KEPT_BYTES:
            copy = memoryview(b"".join(views))
        else:  # nothing else is in the kept memory
            if len(self._kept) < size:
                self._kept = bytearray(size)
            copy = memoryview(self._kept)[:size]
            offset = 0
            for view in views:
                copy[offset : offset + len(view)] = view
                offset += len(view)
        self._queue.append(copy)
        self.unsent += size

    def _wait_to_send(self, deadline: float, timeout: float) -> None:
        if not self._wait(select.POLLOUT, deadline - self.clock.now()):
            error = f"{self.peer} did not take what was sent to it within {timeout:g} s: it hangs"
            self._send_failed(ConnectionBroken(f"an earlier send was given up: {error}"))
            raise WireTimeout(error)

    def _send_failed(self, failure: WireError) -> None:
        self._send_failure = failure
        self._drop_queue()

    def _drop_queue(self) -> None:
        self._queue.clear()
        self.unsent = 0

    # Receiving ---------------------------------------------------------------------------------

    def receive(self, *, timeout: float) -> Incoming:
        """Blocks until a message with all its payload is there.

        Meanwhile it sends what `offer` had to leave.

        Raises:
            WireTimeout: it did not come in time. The connection is still good: what has come is
                kept, and the next receive goes on from there.
            FrameError: what came is not a frame of this conversation, or was refused.
            PeerClosed: the peer closed the connection between two frames.
            ConnectionBroken: the peer or the network broke off.
            ConnectionClosed: after `close`.
        """
        if self._receive_failure is not None:
            raise _again(self._receive_failure)
        deadline = self.clock.now() + timeout
        # Waiting first is cheaper than a read in vain, and mostly it is too early to read.
        ready = self._start != self._stop or timeout <= 0 or self._wait(select.POLLIN, timeout)
        while ready:
            if self.unsent:
                self._flush_aside()
            incoming = self.poll()
            if incoming is not None:
                return incoming
            ready = self._wait(select.POLLIN, deadline - self.clock.now())
        raise WireTimeout(f"{self.peer} sent no complete message within {timeout:g} s")

    def poll(self) -> Incoming | None:
        """Returns a message if a whole one is there. Never blocks.

        It reads a bounded amount, so None may also mean that the descriptor is readable still.
        The other way round, messages may be there when it is not: who waits on it first calls
        this until it returns None, or until nothing is `buffered`.

        Raises:
            FrameError: what came is not a frame of this conversation, or was refused.
            PeerClosed: the peer closed the connection between two frames.
            ConnectionBroken: the peer or the network broke off.
            ConnectionClosed: after `close`.
        """
        if self._receive_failure is not None:
            raise _again(self._receive_failure)
        try:
            if self._incoming is None and not self._read_head():
                return None
            if self._missing and not self._read_payload():
                return None
        except WireError as error:
            self._receive_failure = self._explain(error)
            raise self._receive_failure from error
        incoming = self._incoming
        self._incoming = None
        return incoming

    def _explain(self, error: WireError) -> WireError:
        if isinstance(error, PeerClosed) and (self._incoming is not None or self.buffered):
            return ConnectionBroken(f"{self.peer} closed the connection inside a message")
        if isinstance(error, FrameError):
            return FrameError(f"{self.peer}: {error}")
        return error

    def _read_head(self) -> bool:
        """Reads a header and its metadata, once; returns whether they are there."""
        if self._stop - self._start < self._need:
            if self._start == self._stop:
                self._start = self._stop = 0
                count = self._stop = self._stream.read_into([self._first])
            else:
                if len(self._ahead) - self._start < self._need:
                    self._make_room(self._need)
                count = self._stream.read_into([self._ahead[self._stop :]])
                self._stop += count
            self.bytes_received += count
            if self._stop - self._start < self._need:
                return False
        header = self._header
        if header is None:
            header = self._header = unpack_header(self._ahead, self.limits, self._start)
            self._need += header.metadata_length
            if self._stop - self._start < self._need:
                return False
        self._understand(header)
        return True

    def _make_room(self, need: int) -> None:
        """Moves what is there to the front, of a larger buffer if it is full.

        It grows with what has come, not with what was announced: announcing is free.
        """
        have = self._stop - self._start
        ahead = self._ahead
        if have == len(ahead):
            ahead = memoryview(bytearray(min(2 * have, need)))
        ahead[:have] = bytes(self._ahead[self._start : self._stop])
        self._ahead = self._first = ahead
        self._start, self._stop = 0, have

    def _understand(self, header: Header) -> None:
        """Decodes the metadata and prepares for the payload."""
        end = self._start + self._need
        message = self.catalog.decode(header.kind, self._ahead[self._start + HEADER_SIZE : end])
        length = header.payload_length
        payload: Sequence[memoryview] = ()
        if header.lent:
            lending = self.lending
            if lending is None or length != lending.incoming_bytes:
                raise FrameError(f"{length} bytes lie in lent memory, and none such was lent")
            payload = lending.incoming
        elif length:
            payload = self._place(message, length)
        self._incoming = Incoming(message, header.sequence, payload, length)
        self._header = None
        self._start = end
        if self._missing:
            if end != self._stop:
                self._first = self._ahead[: self._need]
                self._take_from_ahead()
        elif self._first is not self._ahead or len(self._ahead) > _READ_AHEAD:
            self._read_further()
        self._need = HEADER_SIZE

    def _read_further(self) -> None:
        """Reads as far ahead as usual again, and gives a buffer back that has grown."""
        if len(self._ahead) > _READ_AHEAD and self._start == self._stop:
            self._ahead = memoryview(bytearray(_READ_AHEAD))
        self._first = self._ahead

    def _place(self, message: Message, length: int) -> Sequence[memoryview]:
        """Asks where a payload goes."""
        try:
            if self.destination is None:
                payload: Sequence[memoryview] = (memoryview(bytearray(length)),)
            else:
                payload = self.destination(message, length)
        except MemoryError as error:
            raise FrameError(
                f"a payload of {length} bytes is announced, for which there is no memory"
            ) from error
        room = 0
        space = []
        for view in payload:
            if size := view.nbytes:
                flat = view.format == "B" and view.ndim == 1
                space.append(view if flat else view.cast("B"))
                room += size
        if room != length:
            raise FrameError(
                f"{length} bytes come with {type(message).__name__}, and there is room for {room}: "
                "the two sides disagree on what it holds"
            )
        self._space, self._missing = space, length
        return payload

    def _take_from_ahead(self) -> None:
        """Copies what was read of the payload together with the header."""
        while self._missing and self._start != self._stop:
            view = self._space[0]
            count = min(len(view), self._stop - self._start)
            view[:count] = self._ahead[self._start : self._start + count]
            self._start += count
            self._missing -= count
            self._space = _after(self._space, count)

    def _read_payload(self) -> bool:
        """Reads into the payload's own memory, once; returns whether it is full."""
        count = self._stream.read_into(self._space)
        self.bytes_received += count
        self._missing -= count
        if self._missing:
            self._space = _after(self._space, count)
            return False
        self._space = []
        return True

    def _flush_aside(self) -> None:
        """Flushes on the side of a receive, which a failed send does not concern."""
        with suppress(WireError):
            self.flush()

    def _wait(self, events: int, seconds: float) -> bool:
        """Waits until the stream is ready; returns whether it is, within that time."""
        if seconds <= 0:
            return False
        if self.unsent:
            events |= select.POLLOUT
        if events != self._polled:
            self._polled = events
            self._poller.register(self._stream.fileno(), events)
        if self.spin is not None:
            return self.spin.wait(self._poller.poll, seconds, look=events == select.POLLIN)
        return bool(self._poller.poll(math.ceil(seconds * 1000)))


def _again(failure: WireError) -> WireError:
    """Returns an error of the same type and words, without the first one's traceback."""
    return type(failure)(str(failure))


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """Returns what comes after the first `count` bytes."""
    for index, view in enumerate(views):
        size = len(view)
        if count < size:
            return [view[count:], *views[index + 1 :]]
        count -= size
    return []
