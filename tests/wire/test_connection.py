"""Connections over a stream that a test controls byte by byte. See also the conformance suite."""

from __future__ import annotations

import socket
import tracemalloc
from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.clocks import VirtualClock
from tests.conformance import CATALOG, PATIENCE, Note, frame_of, pattern
from trireme.errors import FrameError, PeerClosed, WireTimeout
from trireme.wire.connection import Connection, Incoming, SharedPayload
from trireme.wire.message import Limits, Message, pack_header
from trireme.wire.polling import SpinWait
from trireme.wire.transport import Stream
from trireme.wire.transports.socket_stream import BUFFER_BYTES, SocketStream


class ScriptedStream(Stream):
    """Gives and takes bytes in pieces of the sizes that it is told; 0 is not now."""

    peer = "script"

    def __init__(self, incoming: bytes = b"", sizes: Sequence[int] = ()) -> None:
        self.incoming = memoryview(incoming)
        self.outgoing = bytearray()
        self.sizes = list(sizes)
        self.writes: list[int] = []
        self.closed = False

    def fileno(self) -> int:
        raise AssertionError("nobody may wait for it")

    def read_into(self, buffers: Sequence[memoryview]) -> int:
        assert sum(map(len, buffers)) > 0
        count = 0
        size = self._size()
        for buffer in buffers:
            piece = self.incoming[: min(len(buffer), size - count)]
            buffer[: len(piece)] = piece
            self.incoming = self.incoming[len(piece) :]
            count += len(piece)
        return count

    def write(self, buffers: Sequence[bytes | bytearray | memoryview]) -> int:
        data = b"".join(buffers)
        assert data
        taken = data[: self._size()]
        self.writes.append(len(taken))
        self.outgoing += taken
        return len(taken)

    def close(self) -> None:
        self.closed = True

    def _size(self) -> int:
        return self.sizes.pop(0) if self.sizes else 1 << 60


frames = st.lists(
    st.tuples(st.text(max_size=3000), st.binary(max_size=3000), st.integers(0, 2**64 - 1)),
    min_size=1,
    max_size=5,
)
sizes = st.lists(st.integers(0, 1500), max_size=60)


@given(frames, sizes, st.integers(1, 4))
def test_messages_survive_being_cut_anywhere(
    contents: list[tuple[str, bytes, int]], sizes: list[int], pieces: int
) -> None:
    data = b"".join(frame_of(Note(text), payload, number) for text, payload, number in contents)
    stream = ScriptedStream(data, sizes)

    def destination(message: Message, length: int) -> list[memoryview]:
        cuts = [length * i // pieces for i in range(pieces + 1)]
        memory = memoryview(bytearray(length))
        return [memory[a:b] for a, b in pairwise(cuts)]

    connection = Connection(stream, CATALOG, destination=destination)
    received: list[Incoming] = []
    polls = 0
    while len(received) < len(contents):
        incoming = connection.poll()
        if incoming is not None:
            received.append(incoming)
        polls += 1
        assert polls < 1000, "it does not go on"
    for incoming, (text, payload, number) in zip(received, contents, strict=True):
        assert incoming.message == Note(text)
        assert incoming.sequence == number
        assert b"".join(incoming.payload) == payload
    assert not connection.buffered
    assert connection.bytes_received == len(data)


@given(frames, sizes)
def test_offers_survive_a_stream_that_takes_little(
    contents: list[tuple[str, bytes, int]], sizes: list[int]
) -> None:
    stream = ScriptedStream(sizes=sizes)
    connection = Connection(stream, CATALOG)
    expected = b""
    for text, payload, number in contents:
        memory = bytearray(payload)
        done = connection.offer(Note(text), [memory], sequence=number)
        assert done == (not connection.unsent)
        memory[:] = bytes(len(memory))
        expected += frame_of(Note(text), payload, number)
        assert len(stream.outgoing) + connection.unsent == len(expected)
    while not connection.flush():
        assert len(stream.outgoing) + connection.unsent == len(expected)
    assert stream.outgoing == expected
    assert connection.bytes_sent == len(expected)


@given(st.lists(sizes, min_size=2, max_size=5), st.lists(st.binary(min_size=1), min_size=1))
def test_a_shared_payload_is_copied_once_for_all_connections(
    taken: list[list[int]], parts: list[bytes]
) -> None:
    streams = [ScriptedStream(sizes=each) for each in taken]
    connections = [Connection(stream, CATALOG) for stream in streams]
    memory = [bytearray(part) for part in parts]
    shared = SharedPayload(map(memoryview, memory))
    expected = b""
    for payload in (parts, [bytes(len(part)) for part in parts]):
        for connection in connections:
            connection.offer(Note("x"), shared)
        assert len(shared.kept) in (0, sum(map(len, parts)))
        for part in memory:
            part[:] = bytes(len(part))
        expected += frame_of(Note("x"), b"".join(payload))
        shared = SharedPayload(shared)
    for connection, stream in zip(connections, streams, strict=True):
        while not connection.flush():
            pass
        assert stream.outgoing == expected


def test_a_payload_lies_where_its_receiver_wants_it() -> None:
    memory = memoryview(bytearray(30))
    stream = ScriptedStream(frame_of(Note("x"), bytes(range(30))))
    connection = Connection(stream, CATALOG, destination=lambda message, length: [memory])
    incoming = connection.poll()
    assert incoming is not None and incoming.payload[0] is memory
    assert memory == bytes(range(30))


def test_one_write_sends_header_metadata_and_payload() -> None:
    stream = ScriptedStream()
    Connection(stream, CATALOG).send(Note("x"), [bytes(10), b"", bytes(20)], timeout=1.0)
    assert stream.writes == [len(frame_of(Note("x"), bytes(30)))]


def test_many_small_offers_are_written_together() -> None:
    stream = ScriptedStream(sizes=[0] * 50)
    connection = Connection(stream, CATALOG)
    for _ in range(50):
        assert not connection.offer(Note("x"))
    stream.writes.clear()
    assert connection.flush()
    assert len(stream.writes) == 1


def test_payloads_of_any_shape_and_type() -> None:
    stream = ScriptedStream()
    connection = Connection(stream, CATALOG)
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    scalar = np.float64(7.0)
    connection.send(Note(), [matrix, np.zeros((0, 3)), np.asarray(scalar)], timeout=1.0)
    assert stream.outgoing == frame_of(Note(), matrix.tobytes() + scalar.tobytes())
    received = np.zeros((3, 4), np.float32)
    tail = np.zeros((), np.float64)
    stream.incoming = memoryview(bytes(stream.outgoing))
    views = [memoryview(part) for part in (received, np.zeros((0, 3)), tail)]
    connection.destination = lambda message, length: views
    connection.poll()
    assert (received == matrix).all() and tail == 7.0


def test_a_payload_with_gaps_sends_nothing() -> None:
    stream = ScriptedStream()
    connection = Connection(stream, CATALOG)
    for gaps in (np.zeros((4, 4), np.float32)[:, ::2], memoryview(bytes(10))[::2]):
        with pytest.raises((TypeError, BufferError)):
            connection.send(Note(), [gaps], timeout=1.0)
    assert not stream.outgoing
    connection.send(Note("good"), timeout=1.0)
    assert stream.outgoing == frame_of(Note("good"))


@pytest.mark.parametrize("size", [7, 9, 0])
def test_a_destination_of_another_size_is_a_frame_error(size: int) -> None:
    connection = Connection(ScriptedStream(frame_of(Note(), bytes(8))), CATALOG)
    connection.destination = lambda message, length: [memoryview(bytearray(size))]
    with pytest.raises(FrameError, match=f"8 bytes come with Note, and there is room for {size}"):
        connection.poll()


def test_a_bug_in_a_destination_is_not_disguised() -> None:
    connection = Connection(ScriptedStream(frame_of(Note(), bytes(8))), CATALOG)

    def broken(message: Message, length: int) -> list[memoryview]:
        raise KeyError("a bug")

    connection.destination = broken
    for _ in range(2):
        with pytest.raises(KeyError):
            connection.poll()


def test_frame_errors_name_the_peer_and_last() -> None:
    connection = Connection(ScriptedStream(b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n"), CATALOG)
    for _ in range(2):
        with pytest.raises(FrameError, match=r"script: .*does not speak Trireme's protocol"):
            connection.poll()


def test_a_failure_to_receive_leaves_sending() -> None:
    stream = ScriptedStream(bytes(28))
    connection = Connection(stream, CATALOG)
    with pytest.raises(FrameError):
        connection.poll()
    connection.send(Note("you are wrong"), timeout=1.0)
    assert stream.outgoing == frame_of(Note("you are wrong"))


def test_an_announced_payload_without_memory_is_a_frame_error() -> None:
    frame = pack_header(250, 1, 1 << 60, 0) + b"\x90"
    connection = Connection(ScriptedStream(frame), CATALOG, limits=Limits(payload=1 << 62))
    with pytest.raises(FrameError, match="no memory"):
        connection.poll()


def test_announced_metadata_allocates_nothing() -> None:
    stream = ScriptedStream(pack_header(250, 1 << 30, 0, 0) + bytes(5000), [3000, 2028, 0])
    connection = Connection(stream, CATALOG, limits=Limits(metadata=1 << 30))
    tracemalloc.start()
    assert connection.poll() is None
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 16


def test_large_metadata_leaves_nothing_behind() -> None:
    data = frame_of(Note("x" * 1_000_000)) + frame_of(Note("after"))
    connection = Connection(ScriptedStream(data), CATALOG)
    tracemalloc.start()
    while connection.poll() is None:
        pass
    left = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert left < 1 << 16
    incoming = connection.poll()
    assert incoming is not None and incoming.message == Note("after")


def test_catalog_limits_and_destination_may_change_between_frames() -> None:
    # Both frames come in one read: the second must still be judged by the new limits.
    stream = ScriptedStream(frame_of(Note("small")) + frame_of(Note("x" * 500), bytes(10)))
    connection = Connection(stream, CATALOG, limits=Limits(metadata=100, payload=0))
    assert connection.poll() is not None
    assert connection.buffered
    memory = bytearray(10)
    connection.limits = Limits()
    connection.destination = lambda message, length: [memoryview(memory)]
    incoming = connection.poll()
    assert incoming is not None and incoming.message == Note("x" * 500)
    assert incoming.payload[0].obj is memory


def test_a_message_not_in_the_catalog_is_not_sent() -> None:
    class Foreign(Note, frozen=True, array_like=True):
        kind = 251

    stream = ScriptedStream()
    connection = Connection(stream, CATALOG)
    with pytest.raises(ValueError, match="Foreign is not part"):
        connection.send(Foreign(), timeout=1.0)
    assert not stream.outgoing
    assert connection.offer(Note())


def test_one_poll_does_not_read_without_end() -> None:
    frame = frame_of(Note(), pattern(10_000))
    connection = Connection(ScriptedStream(frame, [len(frame) - 10_000] + [400] * 25), CATALOG)
    polls = 1
    while (incoming := connection.poll()) is None:
        polls += 1
    assert polls == 25
    assert b"".join(incoming.payload) == pattern(10_000)


def test_a_payload_after_one_like_it_is_not_copied() -> None:
    """The second read is exactly the header and metadata, the third all of the payload."""
    message, payload = Note("push"), pattern(50_000)
    frame = frame_of(message, payload)
    stream = ScriptedStream(frame * 3)
    reads: list[int] = []
    original = stream.read_into

    def counted(buffers: Sequence[memoryview]) -> int:
        reads.append(sum(map(len, buffers)))
        return original(buffers)

    stream.read_into = counted  # type: ignore[method-assign]
    connection = Connection(stream, CATALOG)
    for _ in range(3):
        incoming = connection.poll()
        assert incoming is not None and b"".join(incoming.payload) == payload
    head = len(frame) - 50_000
    assert reads[2:] == [head, 50_000] * 2


@pytest.fixture
def pair() -> Iterator[tuple[Connection, Connection]]:
    here, there = socket.socketpair()
    with (
        Connection(SocketStream(here, "there"), CATALOG, clock=VirtualClock()) as ours,
        Connection(SocketStream(there, "here"), CATALOG) as theirs,
    ):
        yield ours, theirs


def test_deadlines_pass_under_a_clock_that_stands_still(
    pair: tuple[Connection, Connection],
) -> None:
    with pytest.raises(WireTimeout, match=r"there sent no complete message within 0\.01 s"):
        pair[0].receive(timeout=0.01)
    with pytest.raises(WireTimeout, match=r"there did not take .* within 0\.01 s"):
        pair[0].send(Note(), [bytes(16 << 20)], timeout=0.01)


class TricklingStream(SocketStream):
    """Gives and takes a thousand bytes at a time, each a tenth of a second later."""

    def __init__(self, connected: socket.socket, clock: VirtualClock) -> None:
        super().__init__(connected, "trickle")
        self.clock = clock

    def read_into(self, buffers: Sequence[memoryview]) -> int:
        self.clock.advance(0.1)
        return super().read_into([buffers[0][:1000]])

    def write(self, buffers: Sequence[bytes | bytearray | memoryview]) -> int:
        self.clock.advance(0.1)
        return super().write([memoryview(buffers[0])[:1000]])


def test_deadlines_hold_though_bytes_keep_moving() -> None:
    here, there = socket.socketpair()
    here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    clock = VirtualClock()
    ours = Connection(TricklingStream(here, clock), CATALOG, clock=clock)
    theirs = Connection(SocketStream(there, "here"), CATALOG)
    theirs.send(Note("a lot"), [pattern(20_000)], timeout=PATIENCE)
    with pytest.raises(WireTimeout):
        ours.receive(timeout=1.05)
    assert clock.now() == pytest.approx(1.1)
    incoming = ours.receive(timeout=3.0)
    assert b"".join(incoming.payload) == pattern(20_000)
    now = clock.now()
    ours.send(Note(), [bytes(20_000)], timeout=3.0)
    with pytest.raises(WireTimeout):
        ours.send(Note(), [bytes(20_000)], timeout=1.05)
    # The header's write and twenty more; then the first write and eleven more.
    assert clock.now() == pytest.approx(now + 2.1 + 1.2)
    ours.close()
    theirs.close()


def test_a_payload_of_numbers_is_cut_anywhere() -> None:
    here, there = socket.socketpair()
    clock = VirtualClock()
    ours = Connection(TricklingStream(here, clock), CATALOG, clock=clock)
    theirs = Connection(SocketStream(there, "here"), CATALOG)
    numbers = array("d", range(2500))
    ours.send(Note(), [numbers], timeout=PATIENCE)
    incoming = theirs.receive(timeout=PATIENCE)
    assert b"".join(incoming.payload) == numbers.tobytes()
    ours.close()
    theirs.close()


@pytest.mark.parametrize("timeout", [0.0, -1.0])
def test_no_time_at_all_still_gives_what_is_there(
    pair: tuple[Connection, Connection], timeout: float
) -> None:
    ours, theirs = pair
    with pytest.raises(WireTimeout):
        ours.receive(timeout=timeout)
    theirs.send(Note("there"), [b"payload"], timeout=PATIENCE)
    assert ours.receive(timeout=timeout).message == Note("there")


def test_who_spins_takes_what_comes_meanwhile(
    pair: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = pair
    looked: list[int] = []

    def give_away() -> None:
        looked.append(len(looked))
        if len(looked) == 3:
            theirs.send(Note("meanwhile"), timeout=PATIENCE)

    monkeypatch.setattr("trireme.wire.polling.os.sched_yield", give_away)
    ours.spin = SpinWait(least=PATIENCE, most=PATIENCE)
    assert ours.receive(timeout=PATIENCE).message == Note("meanwhile")
    assert looked == [0, 1, 2]


def test_leaving_the_block_closes(pair: tuple[Connection, Connection]) -> None:
    ours, theirs = pair
    with ours:
        pass
    with pytest.raises(PeerClosed):
        theirs.receive(timeout=PATIENCE)


def test_the_peer_may_get_a_better_name(pair: tuple[Connection, Connection]) -> None:
    ours, _ = pair
    assert ours.peer == "there"
    ours.peer = "ps:0 at there"
    with pytest.raises(WireTimeout, match="ps:0 at there sent no"):
        ours.receive(timeout=0.0)
