"""Damaged frames of every kind of message, read as every connection reads them.

A stream has a good frame, one that is damaged, and another good one. Whatever the damage, the
reader returns what a second, independent reading of the header finds, or ends with one of the
project's own errors, after which it reads no more. What it returns means what was sent: encoded
again and decoded by no type at all, it is the same value.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tests.fuzz.damage import NUMBERS, damaged_bytes, damaged_value
from tests.fuzz.values import message_of
from trireme.cluster.messages import CLUSTER_CATALOG, CLUSTER_MESSAGES
from trireme.errors import ConnectionBroken, FrameError, PeerClosed, WireError
from trireme.ps.replication.messages import PS_CATALOG, PS_MESSAGES
from trireme.wire.connection import Connection
from trireme.wire.handshake import HANDSHAKE_CATALOG, Challenge, Denied, Hello, Proof, Welcome
from trireme.wire.message import HANDSHAKE_LIMITS, Catalog, Limits, Message, pack_header
from trireme.wire.transport import Stream

HEADER = struct.Struct("!4sBBHIQQ")
OPEN_LIMITS = Limits(metadata=1 << 16, payload=1 << 16)
EXAMPLES = 8
"""How many messages of each kind are damaged, again and again in other ways."""


class Pieces(Stream):
    """A stream whose bytes come in pieces of given lengths; then the peer closes."""

    peer = "fuzzer"
    called = "memory://fuzzer"

    def __init__(self, data: bytes, sizes: Sequence[int]) -> None:
        self._data = data
        self._sizes = sizes
        self._reads = 0
        self._place = 0

    def fileno(self) -> int:
        raise NotImplementedError

    def read_into(self, buffers: Sequence[memoryview]) -> int:
        if self._place == len(self._data):
            raise PeerClosed("the fuzzer has sent everything")
        size = self._sizes[self._reads % len(self._sizes)]
        self._reads += 1
        piece = self._data[self._place : self._place + size]
        taken = 0
        for buffer in buffers:
            part = piece[taken : taken + len(buffer)]
            buffer[: len(part)] = part
            taken += len(part)
            if taken == len(piece):
                break
        self._place += taken
        return taken

    def write(self, buffers: Any) -> int:
        raise NotImplementedError

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Conversation:
    """The messages of a kind of connection, with examples of each."""

    catalog: Catalog
    limits: Limits
    examples: tuple[Message, ...]

    @classmethod
    def of(cls, catalog: Catalog, limits: Limits, kinds: Sequence[type[Message]]) -> Conversation:
        """Makes examples of each type, the same ones each time."""
        draw = random.Random(0)
        examples = [message_of(kind, draw) for kind in kinds for _ in range(EXAMPLES)]
        fitting = [m for m in examples if len(catalog.encode(m)) <= limits.metadata]
        return cls(catalog, limits, tuple(fitting))


CONVERSATIONS = (
    Conversation.of(CLUSTER_CATALOG, OPEN_LIMITS, CLUSTER_MESSAGES),
    Conversation.of(PS_CATALOG, OPEN_LIMITS, PS_MESSAGES),
    Conversation.of(
        HANDSHAKE_CATALOG, HANDSHAKE_LIMITS, (Hello, Challenge, Proof, Welcome, Denied)
    ),
)


def framed(message: Message, metadata: bytes, payload: bytes = b"", sequence: int = 7) -> bytes:
    """Returns a whole frame with the given metadata."""
    return pack_header(message.kind, len(metadata), len(payload), sequence) + metadata + payload


def run_case(draw: random.Random) -> str:
    """Damages one frame, reads it, and checks what came of it; returns how it ended."""
    conversation = draw.choice(CONVERSATIONS)
    catalog, limits = conversation.catalog, conversation.limits
    message, good = draw.choice(conversation.examples), draw.choice(conversation.examples)
    neighbour = framed(good, catalog.encode(good), sequence=3)
    how, bad = _damaged(conversation, message, draw)
    before = neighbour if draw.random() < 0.3 else b""
    after = neighbour if draw.random() < 0.5 else b""
    data = before + bad + after
    if draw.random() < 0.1:
        how, data = "cut anywhere", data[: draw.randrange(len(data) + 1)]
    sizes = draw.choice(((1 << 16,), (1 << 16,), (28,), (1,), (7, 300), (draw.randint(1, 99),)))
    found, error = _read(Pieces(data, sizes), catalog, limits)
    _check(data, catalog, limits, found, error)
    if len(before) <= len(data) and before:
        assert found, f"the good frame before the damaged one was not read: {error!r}"
    return f"{how}: {'accepted' if len(found) > bool(before) else 'refused'}"


_Found = tuple[Message, int, bytes]


def _read(stream: Stream, catalog: Catalog, limits: Limits) -> tuple[list[_Found], WireError]:
    """Returns all messages with sequence and payload, and the error that ends every stream."""
    reader, found = Connection(stream, catalog, limits=limits), list[_Found]()
    error: WireError | None = None
    for _ in range(1 << 20):
        try:
            incoming = reader.poll()
        except WireError as ended:
            error = ended
            break
        if incoming is not None:
            payload = b"".join(bytes(view) for view in incoming.payload)
            found.append((incoming.message, incoming.sequence, payload))
    else:
        raise AssertionError("the reader does not come to an end")
    first: WireError | None = None
    try:
        reader.poll()
    except WireError as again:
        first = again
    assert type(first) is type(error) and str(first) == str(error), "it reads on after an error"
    allowed = (FrameError, ConnectionBroken, PeerClosed)
    assert isinstance(error, allowed), f"ended by {error!r}"
    return found, error


def _check(
    data: bytes, catalog: Catalog, limits: Limits, found: list[_Found], error: WireError
) -> None:
    """Compares what a reader has returned with a reading that shares nothing with it."""
    frames = _frames(data, limits)
    for message, sequence, payload in found:
        kind, number, metadata, following = next(frames)
        assert (message.kind, sequence, payload) == (kind, number, following)
        encoded = catalog.encode(message)
        assert catalog.encode(catalog.decode(kind, encoded)) == encoded
        meant = msgspec.msgpack.decode(encoded)
        assert _means(_plain(metadata, len(meant)), meant), f"{metadata.hex()} became {message!r}"
    rest = next(frames, None)
    if isinstance(error, PeerClosed):
        size = sum(HEADER.size + len(m) + len(p) for *_, m, p in _frames(data, limits))
        assert rest is None and size == len(data), "bytes were dropped without a word"
    if rest is not None and isinstance(error, ConnectionBroken):
        raise AssertionError(f"a whole frame was taken for half of one: {rest!r}")


def _frames(data: bytes, limits: Limits) -> Iterator[tuple[int, int, bytes, bytes]]:
    """Yields kind, sequence, metadata and payload of frames, up to the first that is none."""
    place = 0
    while len(data) - place >= HEADER.size:
        magic, version, kind, flags, metadata, payload, sequence = HEADER.unpack_from(data, place)
        start = place + HEADER.size
        place = start + metadata + payload
        valid = magic == b"TRIR" and version == 1 and flags == 0
        if not valid or metadata > limits.metadata or payload > limits.payload:
            return
        if place > len(data):
            return
        yield kind, sequence, data[start : start + metadata], data[start + metadata : place]


def _plain(metadata: bytes, fields: int) -> list[Any]:
    """Returns the first fields of an array; what a newer peer has added may be anything."""
    raw = msgspec.msgpack.decode(metadata, type=list[msgspec.Raw])
    return [msgspec.msgpack.decode(field) for field in raw[:fields]]


def _means(sent: Any, meant: Any) -> bool:
    """Returns whether plain values mean the same.

    A message's last fields may be left out where they have defaults, and a newer peer may add some
    behind them, which are ignored.
    """
    if isinstance(sent, list) and isinstance(meant, list):
        return all(_means(one, other) for one, other in zip(sent, meant, strict=False))
    if isinstance(sent, dict) and isinstance(meant, dict):
        return all(_means(sent[name], meant[name]) for name in sent.keys() & meant.keys())
    if isinstance(sent, str | bytes) or isinstance(meant, str | bytes):
        return _raw(sent) == _raw(meant)
    if isinstance(meant, float):  # an integer in its place is rounded to the nearest one
        return isinstance(sent, int | float) and repr(float(sent)) == repr(meant)
    return type(sent) is type(meant) and bool(sent == meant)


def _raw(value: Any) -> Any:
    return value.encode() if isinstance(value, str) else value


def _damaged(
    conversation: Conversation, message: Message, draw: random.Random
) -> tuple[str, bytes]:
    """Returns what was done to a frame, and the frame."""
    metadata = conversation.catalog.encode(message)
    payload = draw.randbytes(draw.choice((0, 0, 0, 5, 100))) if conversation.limits.payload else b""
    way = draw.randrange(10)
    if way <= 3:
        plain = msgspec.msgpack.decode(metadata)
        for _ in range(draw.choice((1, 1, 2))):
            plain = damaged_value(plain, draw)
        try:
            changed = msgspec.msgpack.encode(plain)
        except (OverflowError, RecursionError):  # an integer of more than 64 bits
            changed = b"\xcf" + bytes(8)
        return "a value", framed(message, changed, payload)
    if way <= 6:
        return "bytes of the metadata", framed(message, damaged_bytes(metadata, draw), payload)
    if way == 7:
        return "a field of the header", _odd_header(message, metadata, payload, draw)
    if way == 8:
        return "bytes anywhere", damaged_bytes(framed(message, metadata, payload), draw)
    other = draw.choice(conversation.examples)
    return "another kind", framed(other, metadata, payload)


def _odd_header(message: Message, metadata: bytes, payload: bytes, draw: random.Random) -> bytes:
    fields = [b"TRIR", 1, message.kind, 0, len(metadata), len(payload), 7]
    place = draw.randrange(len(fields))
    top = (0, 8, 8, 16, 32, 64, 64)[place]
    odd = draw.choice(NUMBERS) % (1 << top) if top else 0
    magics = (b"HTTP", b"TRIS", b"\0\0\0\0", b"\x16\x03\x01\x02", b"GET ", b"trir")
    fields[place] = odd if place else draw.choice(magics)
    return HEADER.pack(*fields) + metadata + payload
