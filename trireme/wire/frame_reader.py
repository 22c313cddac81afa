"""Reads frames from a stream without blocking, and decodes them into messages.

A payload is read into the memory where it belongs. Only the part of it that came in one read with
the header is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from trireme.errors import ConnectionBroken, FrameError, PeerClosed, ProtocolMismatch, WireError
from trireme.wire.message import HEADER_SIZE, Catalog, Header, Limits, Message, unpack_header
from trireme.wire.shared_memory import Lending
from trireme.wire.transport import Stream

Destination = Callable[[Message, int], Sequence[memoryview]]
"""Returns the memory for a payload, from the message that it belongs to and its length in bytes."""

_READ_AHEAD = 1024  # header and metadata of nearly every message, in one read
_TLS_ALERT = b"\x15\x03"  # if that is all that comes, a listener has answered plain text
_GROWS_FASTER = 1 << 16  # from so many bytes of metadata on the buffer grows eightfold


class Incoming(msgspec.Struct):
    """A message that arrived, with the memory that the destination returned, now filled."""

    message: Message
    sequence: int
    payload: Sequence[memoryview]
    nbytes: int


class FrameReader:
    """Reads the messages of one stream.

    After a failed read nothing more can be read: later calls raise the same error again.

    Attributes:
        catalog, limits: the messages that may be received, and the largest frame.
        destination: called for each payload that is not empty, before it is read, to get the memory
            for it. It may raise `FrameError` to refuse the payload. None allocates a `bytearray`.
        lending: memory that both sides share. Payloads that lie there do not cross the stream.
        peer: the name of the other end, for messages: the stream's address until it is assigned.
        bytes_received: how many bytes came from the stream.

    `catalog`, `limits`, `destination` and `lending` may be replaced between two frames.
    """

    def __init__(
        self, stream: Stream, catalog: Catalog, limits: Limits, destination: Destination | None
    ) -> None:
        self.stream = stream
        self.catalog = catalog
        self.limits = limits
        self.destination = destination
        self.lending: Lending | None = None
        self.peer = stream.peer
        self.bytes_received = 0
        self._receive_failure: WireError | None = None  # the error that every later call raises
        # The bytes that were read and not decoded yet are _buffer[_start:_stop]. When there are
        # none, the next read goes into _first_read. Where payloads follow, that is only as long as
        # the last header and metadata were, so that the payload need not be copied from here.
        self._buffer = memoryview(bytearray(_READ_AHEAD))
        self._first_read = self._buffer
        self._start = 0
        self._stop = 0
        # The current frame: how much of it the buffer must hold next, its header until the
        # metadata is decoded, then the message, and how much of its payload is missing and where
        # that goes.
        self._need = HEADER_SIZE
        self._header: Header | None = None
        self._incoming: Incoming | None = None
        self._missing = 0
        self._space: list[memoryview] = []

    @property
    def buffered(self) -> bool:
        """Whether bytes were read that belong to messages not yet returned.

        If there are none, the descriptor becomes readable before the next message can be there.
        """
        return self._start != self._stop or self.stream.pending

    def poll(self) -> Incoming | None:
        """Returns a message if a complete one is there. Never blocks.

        It reads a bounded amount, so that the descriptor may still be readable after None. Messages
        may also be there when the descriptor is not readable: before you wait on it, call this
        until it returns None, or until nothing is `buffered`.

        Raises:
            FrameError: the bytes are not a frame of this catalog, or the destination refused it.
        """
        if self._receive_failure is not None:
            raise again(self._receive_failure)
        try:
            if self._incoming is None and not self._read_head():
                return None
            if self._missing:
                count = self.stream.read_into(self._space)
                self.bytes_received += count
                self._missing -= count
                if self._missing:
                    self._space = skip_bytes(self._space, count)
                    return None
                self._space = []
        except WireError as error:
            failure, came = error, bytes(self._buffer[self._start : self._stop])
            if self._header is None and len(came) < HEADER_SIZE and came[:2] == _TLS_ALERT:
                failure = ProtocolMismatch(
                    f"{self.peer} speaks TLS only, and this task in plain text: give it its "
                    "certificate (`trireme certs issue`, and --certs)"
                )
            elif isinstance(error, PeerClosed) and (self._incoming is not None or self.buffered):
                failure = ConnectionBroken(f"{self.peer} closed the connection inside a message")
            elif isinstance(error, FrameError) and not str(error).startswith(self.peer):
                failure = type(error)(f"{self.peer}: {error}")
            self._receive_failure = failure
            raise failure from error
        incoming, self._incoming = self._incoming, None
        return incoming

    def _read_head(self) -> bool:
        """Reads a header and its metadata, once; returns whether they are complete."""
        if self._stop - self._start < self._need:
            if self._start == self._stop:
                self._start = self._stop = 0
                count = self._stop = self.stream.read_into([self._first_read])
            else:
                if len(self._buffer) - self._start < self._need:
                    self._make_room(self._need)
                count = self.stream.read_into([self._buffer[self._stop :]])
                self._stop += count
            self.bytes_received += count
            if self._stop - self._start < self._need:
                return False
        header = self._header
        if header is None:
            header = self._header = unpack_header(self._buffer, self.limits, self._start)
            self._need += header.metadata_length
            if self._stop - self._start < self._need:
                return False
        self._decode(header)
        return True

    def _make_room(self, need: int) -> None:
        """Moves the unread bytes to the front, of a larger buffer if this one is full.

        It grows with the bytes that came, not with the announced length, which a peer may set to
        anything.
        """
        have = self._stop - self._start
        buffer = self._buffer
        if have == len(buffer):
            factor = 2 if have < _GROWS_FASTER else 8
            buffer = memoryview(bytearray(min(factor * have, need)))
            buffer[:have] = self._buffer[self._start : self._stop]
        else:  # a copy, as the places may overlap
            buffer[:have] = bytes(self._buffer[self._start : self._stop])
        self._buffer = self._first_read = buffer
        self._start, self._stop = 0, have

    def _decode(self, header: Header) -> None:
        """Decodes the metadata and prepares for the payload."""
        end = self._start + self._need
        message = self.catalog.decode(header.kind, self._buffer[self._start + HEADER_SIZE : end])
        length = header.payload_length
        payload: Sequence[memoryview] = ()
        if header.lent:
            lending = self.lending
            if lending is None or length != lending.incoming_bytes:
                raise FrameError(f"{length} bytes lie in lent memory, and none such was lent")
            payload = lending.incoming
        elif length:
            payload = self._allocate(message, length)
        self._incoming = Incoming(message, header.sequence, payload, length)
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

    def _allocate(self, message: Message, length: int) -> Sequence[memoryview]:
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

    def _take_from_buffer(self) -> None:
        """Copies the part of the payload that was read together with the header."""
        while self._missing and self._start != self._stop:
            view = self._space[0]
            count = min(len(view), self._stop - self._start)
            view[:count] = self._buffer[self._start : self._start + count]
            self._start += count
            self._missing -= count
            self._space = skip_bytes(self._space, count)


def skip_bytes(views: list[memoryview], count: int) -> list[memoryview]:
    """Returns the views without their first `count` bytes."""
    for index, view in enumerate(views):
        size = len(view)
        if count < size:
            return [view[count:], *views[index + 1 :]]
        count -= size
    return []


def again(failure: WireError) -> WireError:
    """Returns an error of the same type and words, without the first one's traceback."""
    return type(failure)(str(failure))
