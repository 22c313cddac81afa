"""Frames and typed messages: converts bytes on the wire to values and back. No I/O.

A frame is a fixed header, metadata (msgpack of one typed message) and a payload (raw bytes of
tensors); docs/protocol.md has its fields. Lengths are checked before anything is allocated.

Kinds: 1-15 the handshake, 16-63 the cluster, 64-127 the parameter server. A kind is never reused.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import msgspec

from trireme.errors import ConfigurationError, FrameError, ProtocolMismatch

MAGIC = b"TRIR"
_TLS = b"\x16\x03"  # how a client begins to speak TLS
_LENT = 1  # a flag: the payload lies in lent memory and does not follow
PROTOCOL_VERSION = 1
# magic, version, kind, flags, metadata length, payload length, sequence
_HEADER = struct.Struct("!4sBBHIQQ")
HEADER_SIZE = _HEADER.size

# A count, step, sequence number or offset: never negative, and far from overflow.
Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Index = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]  # of a task, or of a parameter group
Name = Annotated[str, msgspec.Meta(max_length=1024)]  # or an address


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of every typed message. A subclass sets `kind`, unique over the whole protocol."""

    kind: ClassVar[int] = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest frame that is accepted, in bytes."""

    metadata: int = 1 << 28
    payload: int = 1 << 40


HANDSHAKE_LIMITS = Limits(metadata=1024, payload=0)  # before a peer has proven the secret


class Header(msgspec.Struct, frozen=True, gc=False):
    """The fixed part of a frame."""

    kind: int
    metadata_length: int
    payload_length: int
    sequence: int  # a reply carries its request's; 0 where no reply is expected
    lent: bool = False


def pack_header(
    kind: int, metadata_length: int, payload_length: int, sequence: int, *, lent: bool = False
) -> bytes:
    """Returns the bytes of a header; see `Header`."""
    lengths = metadata_length, payload_length
    return _HEADER.pack(MAGIC, PROTOCOL_VERSION, kind, _LENT if lent else 0, *lengths, sequence)


def unpack_header(data: bytes | bytearray | memoryview, limits: Limits, offset: int = 0) -> Header:
    """Reads a header at an offset; raises `FrameError` if it is malformed or over the limits."""
    fields = _HEADER.unpack_from(data, offset)
    magic, version, kind, flags, metadata_length, payload_length, sequence = fields
    if magic[:2] == _TLS:
        raise ProtocolMismatch(
            "the peer speaks TLS, and this side plain text: it has no certificate"
        )
    if magic != MAGIC:
        raise FrameError(
            f"the peer does not speak Trireme's protocol: a frame began with {bytes(magic)!r}"
        )
    if version != PROTOCOL_VERSION:
        raise ProtocolMismatch(
            f"the peer speaks version {version} of the protocol and this side {PROTOCOL_VERSION}: "
            "install the same release of trireme on both"
        )
    if flags & ~_LENT:
        raise FrameError(f"a frame has flags 0x{flags:04x}, which this version does not know")
    if metadata_length > limits.metadata:
        what, most = f"{metadata_length} bytes of metadata", limits.metadata
    elif payload_length > limits.payload:
        what, most = f"a payload of {payload_length} bytes", limits.payload
    else:
        return Header(kind, metadata_length, payload_length, sequence, flags == _LENT)
    raise FrameError(f"a frame announces {what}; at most {most} are accepted here")


class Catalog:
    """The message types that may be sent and received on a connection."""

    def __init__(self, types: Iterable[type[Message]]) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._last: tuple[Message | None, bytes] = None, b""  # one for many is encoded once
        self._decoders: dict[int, msgspec.msgpack.Decoder[Any]] = {}
        for message_type in types:
            kind = message_type.kind
            if not 0 < kind < 256 or kind in self._decoders:
                raise ValueError(f"kind {kind} of {message_type.__name__} is not free")
            self._decoders[kind] = msgspec.msgpack.Decoder(message_type)

    def encode(self, message: Message) -> bytes:
        """Returns the metadata bytes of a message; raises `ValueError` if it is in no catalog."""
        last, encoded = self._last  # read at once: threads share a catalog
        if message is last:
            return encoded
        if message.kind not in self._decoders:
            raise ValueError(f"{type(message).__name__} is not part of this conversation")
        encoded = self._encoder.encode(message)
        self._last = message, encoded
        return encoded

    def decode(self, kind: int, metadata: bytes | bytearray | memoryview) -> Message:
        """Reads the metadata of a frame of a kind; raises `FrameError` where they do not fit."""
        decoder = self._decoders.get(kind)
        if decoder is None:
            raise FrameError(f"a frame has kind {kind}, which is not part of this conversation")
        try:
            message: Message = decoder.decode(metadata)
        except (
            msgspec.DecodeError,
            ConfigurationError,  # of values that check themselves
            ValueError,
            OverflowError,
            RecursionError,
        ) as error:
            raise FrameError(f"a {decoder.type.__name__} frame is malformed: {error}") from error
        return message
