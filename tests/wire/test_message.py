from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trireme.errors import ConfigurationError, FrameError
from trireme.wire.message import (
    HEADER_SIZE,
    PROTOCOL_VERSION,
    Catalog,
    Header,
    Limits,
    Message,
    pack_header,
    unpack_header,
)


class Everything(Message, frozen=True, array_like=True):
    kind: ClassVar[int] = 200
    number: int = 0
    text: str = ""
    data: bytes = b""
    many: tuple[int, ...] = ()
    names: dict[str, int] = msgspec.field(default_factory=dict)
    pairs: list[tuple[int, int]] = msgspec.field(default_factory=list)


class Other(Message, frozen=True, array_like=True):
    kind: ClassVar[int] = 201


CATALOG = Catalog([Everything, Other])
LIMITS = Limits(metadata=1000, payload=5000)

headers = st.builds(
    Header,
    kind=st.integers(0, 255),
    metadata_length=st.integers(0, 2**32 - 1),
    payload_length=st.integers(0, 2**64 - 1),
    sequence=st.integers(0, 2**64 - 1),
    lent=st.booleans(),
)


@given(headers)
def test_a_header_survives_the_trip(header: Header) -> None:
    packed = pack_header(**msgspec.structs.asdict(header))
    assert len(packed) == HEADER_SIZE == 28
    limits = Limits(metadata=2**32, payload=2**64)
    assert unpack_header(packed, limits) == header
    assert unpack_header(b"???" + packed + b"?", limits, 3) == header


def test_the_layout_of_a_header_is_fixed() -> None:
    packed = pack_header(66, 0x01020304, 0x05060708090A0B0C, 0x0D0E0F1011121314)
    assert packed == b"TRIR\x01\x42\x00\x00" + bytes(range(1, 0x15))


@pytest.mark.parametrize(
    ("offset", "replacement", "complaint"),
    [
        (0, b"HTTP", "does not speak Trireme"),
        (3, b"r", "does not speak Trireme"),
        (4, bytes([PROTOCOL_VERSION + 1]), "version 2 of the protocol and this side 1: install"),
        (4, b"\0", "version 0"),
        (6, b"\x80\0", "flags 0x8000"),
        (7, b"\2", "flags 0x0002"),
        (8, b"\xff\xff\xff\xff", "4294967295 bytes of metadata; at most 1000"),
        (12, b"\xff" * 8, "payload of 18446744073709551615 bytes; at most 5000"),
    ],
)
def test_a_wrong_header_is_refused(offset: int, replacement: bytes, complaint: str) -> None:
    packed = bytearray(pack_header(200, 1000, 5000, 1))
    unpack_header(packed, LIMITS)
    packed[offset : offset + len(replacement)] = replacement
    with pytest.raises(FrameError, match=complaint):
        unpack_header(packed, LIMITS)


@given(
    st.builds(
        Everything,
        st.integers(-(2**63), 2**64 - 1),
        st.text(),
        st.binary(),
        st.lists(st.integers(-1000, 1000)).map(tuple),
        st.dictionaries(st.text(), st.integers(-1000, 1000)),
    )
)
def test_a_message_survives_the_trip(message: Everything) -> None:
    assert CATALOG.decode(200, CATALOG.encode(message)) == message


@given(st.binary(max_size=200))
def test_random_metadata_is_a_message_or_a_frame_error(data: bytes) -> None:
    for kind in (200, 201, 202):
        try:
            assert isinstance(CATALOG.decode(kind, data), Message)
        except FrameError:
            continue


@given(st.builds(Everything, st.integers(0, 10**6), st.text(), st.binary()), st.data())
def test_damaged_metadata_is_a_message_or_a_frame_error(
    message: Everything, data: st.DataObject
) -> None:
    metadata = bytearray(CATALOG.encode(message))
    metadata[data.draw(st.integers(0, len(metadata) - 1))] = data.draw(st.integers(0, 255))
    try:
        assert isinstance(CATALOG.decode(200, metadata), Everything)
    except FrameError:
        return


def test_text_that_is_not_utf8_is_a_frame_error() -> None:
    with pytest.raises(FrameError, match="Everything frame is malformed"):
        CATALOG.decode(200, b"\x92\x00\xa2\xff\xfe")


@pytest.mark.parametrize("field", range(6))
def test_announced_lengths_allocate_nothing(field: int) -> None:
    fields = [b"\x00", b"\xa0", b"\xc4\x00", b"\x90", b"\x80", b"\x90"]
    bombs = [b"\xdd", b"\xdb", b"\xc6", b"\xdd", b"\xdf", b"\xdd"]
    metadata = b"\x96" + b"".join(fields[:field]) + bombs[field] + b"\xff\xff\xff\xf0"
    tracemalloc.start()
    with pytest.raises(FrameError):
        CATALOG.decode(200, metadata)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 16


def test_nesting_without_end_is_a_frame_error() -> None:
    with pytest.raises(FrameError, match="malformed"):
        CATALOG.decode(200, b"\x91" * 1_000_000)


def test_a_newer_peer_may_add_fields() -> None:
    assert CATALOG.decode(201, b"\x92\x01\x02") == Other()


def test_a_kind_of_another_conversation_is_refused() -> None:
    with pytest.raises(FrameError, match="kind 99"):
        CATALOG.decode(99, b"\x90")
    with pytest.raises(ValueError, match="Other is not part"):
        Catalog([Everything]).encode(Other())


def test_a_message_for_many_is_encoded_once() -> None:
    catalog, first, second = Catalog([Other]), Other(), Other()
    encoded = catalog.encode(first)
    assert catalog.encode(first) is encoded
    assert catalog.encode(second) is not encoded
    assert catalog.encode(first) == encoded


def test_a_kind_is_taken_once() -> None:
    class Twin(Message, frozen=True, array_like=True):
        kind: ClassVar[int] = 201

    class Unnumbered(Message, frozen=True, array_like=True):
        pass

    with pytest.raises(ValueError, match="kind 201 of Twin is not free"):
        Catalog([Other, Twin])
    with pytest.raises(ValueError, match="kind 0 of Unnumbered"):
        Catalog([Unnumbered])


class Checked(msgspec.Struct, frozen=True):
    """A value that checks itself, as the specification of a table does."""

    value: int

    def __post_init__(self) -> None:
        if self.value < 0:
            raise ConfigurationError("below 0")


class Carries(Message, frozen=True, array_like=True):
    kind = 1
    what: Checked


def test_a_value_that_refuses_itself_is_a_malformed_frame() -> None:
    catalog = Catalog((Carries,))
    assert catalog.decode(1, msgspec.msgpack.encode([{"value": 1}])) == Carries(Checked(1))
    with pytest.raises(FrameError, match="a Carries frame is malformed: below 0"):
        catalog.decode(1, msgspec.msgpack.encode([{"value": -1}]))


def test_the_page_says_how_large_metadata_may_be() -> None:
    page = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
    assert f"metadata up to {Limits().metadata >> 20} MiB and payload up to\n1 TiB" in page
    assert Limits().payload == 1 << 40
