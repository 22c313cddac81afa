"""Whatever a peer sends, it is closed, the service goes on, and nothing large is allocated."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.clocks import VirtualClock
from tests.conformance import read_exactly, read_until_end, write_all
from tests.wire.serving import CATALOG, JOB, Echo, EchoHandler, Running, ask, running
from trireme.errors import ConnectionBroken, PeerClosed
from trireme.wire.connection import Connection
from trireme.wire.handshake import HANDSHAKE_CATALOG, Denied, Hello, Identity
from trireme.wire.message import HEADER_SIZE, Limits, Message, pack_header
from trireme.wire.refusals import ServiceLimits
from trireme.wire.transport import Stream

LIMITS = Limits(metadata=1 << 16, payload=1 << 20)
HEADER = struct.Struct("!4sBBHIQQ")
MEMORY = 1 << 20  # for all that the service and the test need while a bad peer is there

live = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@contextmanager
def little_memory() -> Iterator[None]:
    """Checks what the block allocates; only the service's thread and this one are there."""
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    yield
    assert tracemalloc.get_traced_memory()[1] - before < MEMORY


class Victim:
    """A service, and a good client of it that wants to be served whatever happens."""

    def __init__(self, run: Running, handler: EchoHandler, clock: VirtualClock) -> None:
        self.run = run
        self.handler = handler
        self.clock = clock
        self.good = run.client("worker:0")

    def attack_as_stranger(self, data: bytes) -> None:
        """Sends bytes before any handshake; they must not outlive its deadline."""
        with little_memory():
            stream = self.run.stranger()
            self._send(stream, data)
            self.run.turn()
            self.clock.advance(11.0)
            self.run.turn()
            read_until_end(stream)
            stream.close()
            ask(self.good, "still served", b"payload")

    def attack_as_worker(self, data: bytes, closed: bool = True) -> None:
        """Sends bytes after the handshake, then closes the connection or waits for its end."""
        with little_memory():
            stream = self.run.client("worker:1").stream
            self._send(stream, data)
            if closed:
                read_until_end(stream)
            stream.close()
            ask(self.good, "still served", b"payload")

    def _send(self, stream: Stream, data: bytes) -> None:
        with suppress(PeerClosed, ConnectionBroken):  # closed before all was written
            write_all(stream, data)


@pytest.fixture(scope="module")
def victim() -> Iterator[Victim]:
    handler, clock = EchoHandler(), VirtualClock()
    with running(handler, clock=clock, limits=ServiceLimits(frame=LIMITS)) as run:
        tracemalloc.start()
        yield Victim(run, handler, clock)
        tracemalloc.stop()


def frame(message: Message, payload: bytes = b"", sequence: int = 1) -> bytes:
    catalog = HANDSHAKE_CATALOG if isinstance(message, Hello | Denied) else CATALOG
    metadata = catalog.encode(message)
    return pack_header(message.kind, len(metadata), len(payload), sequence) + metadata + payload


HELLO = Hello(JOB, "", "worker:1", 0, bytes(32))

headers = st.builds(
    HEADER.pack,
    st.sampled_from([b"TRIR", b"TRIR", b"TRIR", b"RIRT"]),
    st.sampled_from([1, 1, 1, 0, 2, 255]),
    st.one_of(st.sampled_from([Echo.kind, Hello.kind]), st.integers(0, 255)),
    st.sampled_from([0, 0, 0, 1, 65535]),
    st.one_of(st.integers(0, 50), st.integers(0, 2**32 - 1)),
    st.one_of(st.just(0), st.integers(0, 50), st.integers(0, 2**64 - 1)),
    st.integers(0, 2**64 - 1),
)
junk = st.one_of(
    st.binary(max_size=200), st.builds(bytes.__add__, headers, st.binary(max_size=100))
)


@live
@given(junk)
def test_anything_from_a_stranger(victim: Victim, data: bytes) -> None:
    victim.attack_as_stranger(data)


@live
@given(st.integers(0, len(frame(HELLO)) - 1))
def test_a_hello_cut_anywhere(victim: Victim, cut: int) -> None:
    victim.attack_as_stranger(frame(HELLO)[:cut])


@live
@given(st.integers(0, len(frame(HELLO)) - 1), st.integers(0, 255))
def test_a_hello_damaged_anywhere(victim: Victim, place: int, byte: int) -> None:
    data = bytearray(frame(HELLO))
    data[place] = byte
    victim.attack_as_stranger(bytes(data))


@live
@given(junk)
def test_anything_from_a_worker(victim: Victim, data: bytes) -> None:
    # What may be the beginning of a good message is waited for: only leaving ends that.
    victim.attack_as_worker(data, closed=False)


@live
@given(st.binary(min_size=1, max_size=300))
def test_bad_metadata_from_a_worker(victim: Victim, metadata: bytes) -> None:
    header = pack_header(Echo.kind, len(metadata), 0, 0)
    victim.attack_as_worker(header + metadata, closed=False)


BAD_HEADERS = {
    "magic": (b"HTTP", 1, Echo.kind, 0, 1, 0, 0),
    "version": (b"TRIR", 2, Echo.kind, 0, 1, 0, 0),
    "flags": (b"TRIR", 1, Echo.kind, 4, 1, 0, 0),
    "kind": (b"TRIR", 1, 99, 0, 1, 0, 0),
    "handshake again": (b"TRIR", 1, Hello.kind, 0, 1, 0, 0),
    "metadata length": (b"TRIR", 1, Echo.kind, 0, 2**32 - 1, 0, 0),
    "payload length": (b"TRIR", 1, Echo.kind, 0, 1, 2**64 - 1, 0),
    "payload over the limit": (b"TRIR", 1, Echo.kind, 0, 1, LIMITS.payload + 1, 0),
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_a_bad_header_ends_the_connection_at_once(victim: Victim, name: str) -> None:
    header = HEADER.pack(*BAD_HEADERS[name])
    assert len(header) == HEADER_SIZE
    # No clock moves: it is closed for what it sent.
    victim.attack_as_worker(header + b"\x90" * 8)
    stranger = victim.run.stranger()
    write_all(stranger, header + b"\x90" * 8)
    answer = frame(Denied("version"), sequence=0) if name == "version" else b""
    assert read_until_end(stranger) == answer
    stranger.close()


BAD_METADATA = {
    "not a message": b"\x01",
    "a field too few": b"\x90\x90",
    "a wrong type": b"\x91\x05",
    "text that is not UTF-8": b"\x91\xa2\xff\xfe",
    "an array without end": b"\xdd\xff\xff\xff\xff",
    "text without end": b"\x91\xdb\xff\xff\xff\xff",
    "nesting without end": b"\x91" * 60_000,
    "nothing": b"",
}


@pytest.mark.parametrize("name", BAD_METADATA)
def test_bad_metadata_ends_the_connection_at_once(victim: Victim, name: str) -> None:
    metadata = BAD_METADATA[name]
    victim.attack_as_worker(pack_header(Echo.kind, len(metadata), 0, 0) + metadata)


def test_what_is_announced_and_does_not_come(victim: Victim) -> None:
    """Within the limits, so it is waited for; little is held meanwhile."""
    with little_memory():
        waiting = [victim.run.client(f"worker:{i}") for i in range(1, 30)]
        header = pack_header(Echo.kind, LIMITS.metadata, 0, 0)
        for client in waiting:
            write_all(client.stream, header + b"\x91")
        ask(victim.good, "still served")
    for client in waiting:
        client.close()


def test_a_stranger_gets_no_answer_but_a_challenge(victim: Victim) -> None:
    stranger = victim.run.stranger()
    write_all(stranger, frame(HELLO) + frame(Echo("let me in")))
    challenge = 28 + 1 + 2 + 32
    read_exactly(stranger, challenge)
    assert read_until_end(stranger) == b""
    stranger.close()


@live
@given(st.data())
def test_a_conversation_damaged_at_one_place(victim: Victim, data: st.DataObject) -> None:
    """Good messages and one with a wrong byte: nothing wrong is ever echoed as if it were good."""
    frames = [frame(Echo(f"message {i}"), b"p" * i) for i in range(5)]
    damaged = bytearray(b"".join(frames))
    place = data.draw(st.integers(0, len(damaged) - 1))
    damaged[place] ^= data.draw(st.integers(1, 255))
    victim.attack_as_worker(bytes(damaged), closed=False)


def test_the_good_client_was_never_dropped(victim: Victim) -> None:
    ask(victim.good, "to the end", bytes(1 << 16))
    gone = {link.identity for link, _ in list(victim.handler.closings.queue)}
    assert Identity(JOB, "worker:0") not in gone
    assert isinstance(victim.good, Connection)
