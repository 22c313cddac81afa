"""What every implementation of an interface must pass.

A transport is tested by a subclass of `TransportConformance` that says at which address to listen:

    class TestCarrierPigeon(TransportConformance):
        address = "pigeon://loft"
"""

from __future__ import annotations

import re
import select
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

import pytest

from trireme.errors import (
    AddressInUse,
    ConnectionBroken,
    ConnectionClosed,
    ConnectionRefused,
    FrameError,
    PeerClosed,
    WireTimeout,
)
from trireme.wire.connection import Connection, Incoming
from trireme.wire.message import Catalog, Limits, Message, pack_header
from trireme.wire.transport import Listener, Stream, connect, listen

PATIENCE = 20.0  # seconds, for what happens at once unless the machine is busy
LARGE = 24 << 20  # more than any socket's buffers hold


class Note(Message, frozen=True, array_like=True):
    """A message to test with."""

    kind: ClassVar[int] = 250
    text: str = ""


CATALOG = Catalog([Note])


def pattern(size: int, seed: int = 1) -> bytes:
    """Bytes that show when a piece is missing, doubled or moved."""
    block = bytes((seed + 7 * i + (i >> 8)) % 251 for i in range(251 * 256))
    return (block * (size // len(block) + 1))[:size]


def wait_readable(stream: Stream | Listener) -> None:
    assert _polled(stream, select.POLLIN), "it never became readable"


def _polled(stream: Stream | Listener, event: int) -> bool:
    """Waits for an event; not by `select`, which refuses descriptors from 1024 on."""
    poll = select.poll()
    poll.register(stream, event)
    return bool(poll.poll(1000 * PATIENCE))


def read_exactly(stream: Stream, size: int, writer: Stream | None = None) -> bytes:
    """Reads so many bytes, waiting for them; has their writer flush meanwhile, if there is one."""
    data = memoryview(bytearray(size))
    done = 0
    while done < size:
        if writer is not None:
            writer.flush()
        count = stream.read_into([data[done:]])
        if count == 0:
            wait_readable(stream)
        done += count
    return bytes(data)


def read_until_end(stream: Stream) -> bytes:
    """Reads until the peer closes or the connection breaks; returns what came before that."""
    data = bytearray()
    buffer = memoryview(bytearray(1 << 16))
    with suppress(PeerClosed, ConnectionBroken):
        while True:
            count = stream.read_into([buffer])
            data += buffer[:count]
            if count == 0:
                wait_readable(stream)
    return bytes(data)


def write_all(stream: Stream, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        count = stream.write([rest])
        if count == 0:
            assert _polled(stream, select.POLLOUT), "it never became writable"
        rest = rest[count:]


def fill(stream: Stream) -> int:
    """Writes until nothing more is taken; returns how many bytes were."""
    total = 0
    block = pattern(1 << 20)
    while count := stream.write([memoryview(block)[total % len(block) :]]):
        total += count
        assert total < 1 << 30, "a stream that nobody reads takes everything"
    assert stream.unsent < 1 << 20, "a stream keeps what it should not take"
    return total


def poll_until(connection: Connection, *others: Connection) -> Incoming:
    """Polls one connection until a message comes, and flushes the others meanwhile."""
    deadline = connection.clock.now() + PATIENCE
    while connection.clock.now() < deadline:
        for other in others:
            other.flush()
        incoming = connection.poll()
        if incoming is not None:
            return incoming
        select.select([connection], [other for other in others if other.unsent], [], 0.01)
    raise AssertionError("no message came")


def receive_and_flush(connection: Connection) -> Incoming:
    """Receives one message and sends all that was offered."""
    incoming = connection.receive(timeout=PATIENCE)
    while not connection.flush():
        assert select.select([], [connection], [], PATIENCE)[1], "the peer does not read"
    return incoming


class TransportConformance:
    """The rules of `trireme.wire.transport`, and of connections over it.

    Attributes:
        address: where to listen; with a port or name that the system chooses.
        connects_alone: whether a client has connected before the other side has accepted.
    """

    address: ClassVar[str]
    connects_alone: ClassVar[bool] = True

    def listen(self, address: str) -> Listener:
        """Listens; a transport with options of its own gives them here."""
        return listen(address)

    def connect(self, address: str) -> Stream:
        """Connects, likewise. It may need the other side's help to return."""
        return connect(address, timeout=PATIENCE)

    @pytest.fixture
    def listener(self) -> Iterator[Listener]:
        listener = self.listen(self.address)
        yield listener
        listener.close()

    def accept(self, listener: Listener, connecting: Future[Stream]) -> tuple[Stream, Stream]:
        """Accepts a connection, and helps the connecting side; returns both ends."""
        wait_readable(listener)
        theirs = listener.accept()
        assert theirs is not None
        while not connecting.done() or theirs.certified == ():
            select.select([theirs], [], [], 0.01)
            assert theirs.read_into([memoryview(bytearray(1))]) == 0
        return connecting.result(), theirs

    @pytest.fixture
    def streams(self, listener: Listener) -> Iterator[tuple[Stream, Stream]]:
        with in_thread(self.connect, listener.address) as connecting:
            ours, theirs = self.accept(listener, connecting)
        yield ours, theirs
        ours.close()
        theirs.close()

    @pytest.fixture
    def connections(self, streams: tuple[Stream, Stream]) -> tuple[Connection, Connection]:
        ours, theirs = streams
        return Connection(ours, CATALOG), Connection(theirs, CATALOG)

    # Streams -----------------------------------------------------------------------------------

    def test_bytes_arrive_in_order(self, streams: tuple[Stream, Stream]) -> None:
        ours, theirs = streams
        for piece in (b"one ", b"two ", b"three"):
            write_all(ours, piece)
        assert read_exactly(theirs, 13) == b"one two three"

    def test_reading_nothing_gives_zero(self, streams: tuple[Stream, Stream]) -> None:
        assert streams[0].read_into([memoryview(bytearray(8))]) == 0

    def test_a_read_may_be_partial(self, streams: tuple[Stream, Stream]) -> None:
        ours, theirs = streams
        write_all(ours, b"abc")
        wait_readable(theirs)
        buffer = memoryview(bytearray(b"......"))
        assert theirs.read_into([buffer]) == 3
        assert bytes(buffer) == b"abc..."

    def test_buffers_are_filled_one_after_the_other(self, streams: tuple[Stream, Stream]) -> None:
        ours, theirs = streams
        write_all(ours, b"abcdefg")
        wait_readable(theirs)
        first, empty, last = (memoryview(bytearray(n)) for n in (3, 0, 9))
        assert theirs.read_into([first, empty, last]) == 7
        assert bytes(first) == b"abc"
        assert bytes(last[:4]) == b"defg"

    def test_buffers_are_gathered_in_order(self, streams: tuple[Stream, Stream]) -> None:
        ours, theirs = streams
        assert ours.write([b"ab", b"", bytearray(b"cd"), memoryview(b"ef")]) == 6
        assert read_exactly(theirs, 6) == b"abcdef"

    def test_more_buffers_than_the_system_takes_at_once(
        self, streams: tuple[Stream, Stream]
    ) -> None:
        ours, theirs = streams
        data = pattern(5000)
        pieces = [memoryview(data)[i : i + 1] for i in range(len(data))]
        while pieces:
            taken = ours.write(pieces)
            assert taken > 0
            pieces = pieces[taken:]
        received = [memoryview(bytearray(1)) for _ in data]
        done = 0
        while done < len(data):
            wait_readable(theirs)
            done += theirs.read_into(received[done:])
        assert b"".join(received) == data

    def test_a_full_stream_takes_nothing_until_the_peer_reads(
        self, streams: tuple[Stream, Stream]
    ) -> None:
        ours, theirs = streams
        total = fill(ours)
        assert total > 0
        assert ours.write([b"x"]) == 0
        assert not select.select([], [ours], [], 0)[1]
        data = read_exactly(theirs, total, ours)
        assert data == (pattern(1 << 20) * (total // (1 << 20) + 1))[:total]
        assert select.select([], [ours], [], PATIENCE)[1]
        assert ours.write([b"x"]) == 1

    def test_both_directions_are_independent(self, streams: tuple[Stream, Stream]) -> None:
        ours, theirs = streams
        fill(ours)
        write_all(theirs, b"back")
        assert read_exactly(ours, 4) == b"back"

    def test_what_was_written_before_close_is_delivered(
        self, streams: tuple[Stream, Stream]
    ) -> None:
        ours, theirs = streams
        write_all(ours, b"last words")
        ours.close()
        assert read_exactly(theirs, 10) == b"last words"
        wait_readable(theirs)
        for _ in range(2):
            with pytest.raises(PeerClosed, match="closed"):
                theirs.read_into([memoryview(bytearray(8))])

    def test_writing_to_a_peer_that_closed(self, streams: tuple[Stream, Stream]) -> None:
        ours, theirs = streams
        theirs.close()
        wait_readable(ours)
        with pytest.raises((PeerClosed, ConnectionBroken)):
            fill(ours)

    def test_using_a_closed_stream(self, streams: tuple[Stream, Stream]) -> None:
        ours, _ = streams
        ours.close()
        ours.close()
        with pytest.raises(ConnectionClosed, match="this side"):
            ours.read_into([memoryview(bytearray(8))])
        with pytest.raises(ConnectionClosed, match="this side"):
            ours.write([b"x"])
        with pytest.raises(ConnectionClosed, match="this side"):
            ours.write([b"x", b"y"])

    def test_streams_name_their_peers(
        self, listener: Listener, streams: tuple[Stream, Stream]
    ) -> None:
        ours, theirs = streams
        assert ours.peer == listener.address
        assert theirs.peer.startswith(self.address.partition("://")[0])

    # Listeners ---------------------------------------------------------------------------------

    def test_accepting_nobody(self, listener: Listener) -> None:
        assert listener.accept() is None

    def test_many_connect_before_one_is_accepted(self, listener: Listener) -> None:
        with ThreadPoolExecutor(5) as pool:
            connecting = []
            for _ in range(5):
                connecting.append(pool.submit(self.connect, listener.address))
                if self.connects_alone:
                    connecting[-1].result(PATIENCE)
            clients, accepted = [], []
            while len(accepted) < 5:
                wait_readable(listener)
                stream = listener.accept()
                assert stream is not None
                accepted.append(stream)
            while not all(each.done() for each in connecting):
                for stream in accepted:
                    assert stream.read_into([memoryview(bytearray(1))]) == 0
            clients = [each.result() for each in connecting]
        for number, client in enumerate(clients):
            write_all(client, bytes([number]))
        numbers = [read_exactly(stream, 1)[0] for stream in accepted]
        assert (numbers if self.connects_alone else sorted(numbers)) == [0, 1, 2, 3, 4]
        for stream in (*clients, *accepted):
            stream.close()

    def test_the_address_is_taken_until_close(self, listener: Listener) -> None:
        with pytest.raises(AddressInUse, match=r"taken by .*choose another"):
            self.listen(listener.address)
        listener.close()
        again = self.listen(listener.address)
        assert again.address == listener.address
        again.close()

    def test_the_system_chooses_different_addresses(self, listener: Listener) -> None:
        other = self.listen(self.address)
        assert other.address != listener.address
        other.close()

    def test_connecting_where_nobody_listens(self, listener: Listener) -> None:
        listener.close()
        with pytest.raises(ConnectionRefused, match=re.escape(listener.address)):
            self.connect(listener.address)

    def test_a_closed_listener(self, listener: Listener) -> None:
        listener.close()
        listener.close()
        with pytest.raises(ConnectionClosed, match="this side"):
            listener.accept()

    def test_accepted_streams_outlive_their_listener(
        self, listener: Listener, streams: tuple[Stream, Stream]
    ) -> None:
        ours, theirs = streams
        listener.close()
        write_all(ours, b"still here")
        assert read_exactly(theirs, 10) == b"still here"

    def test_closing_a_listener_drops_those_who_wait(self, listener: Listener) -> None:
        with in_thread(self.connect, listener.address) as connecting:
            wait_readable(listener)
            if self.connects_alone:
                connecting.result(PATIENCE)
            listener.close()
            with pytest.raises((PeerClosed, ConnectionBroken)):
                waiting = connecting.result(PATIENCE)
                wait_readable(waiting)
                waiting.read_into([memoryview(bytearray(1))])

    def test_accept_wakes_who_waits(self, listener: Listener) -> None:
        with (
            in_thread(wait_readable, listener) as woken,
            in_thread(self.connect, listener.address) as connecting,
        ):
            woken.result(PATIENCE)
            for stream in self.accept(listener, connecting):
                stream.close()

    # Connections -------------------------------------------------------------------------------

    def test_messages_arrive_in_order(self, connections: tuple[Connection, Connection]) -> None:
        ours, theirs = connections
        for number in range(300):
            ours.send(Note(f"note {number}"), [b"p" * number], sequence=number, timeout=PATIENCE)
        for number in range(300):
            incoming = theirs.receive(timeout=PATIENCE)
            assert incoming.message == Note(f"note {number}")
            assert incoming.sequence == number
            assert incoming.nbytes == number
            assert b"".join(incoming.payload) == b"p" * number
        assert ours.bytes_sent == theirs.bytes_received > 0

    def test_a_large_payload(self, connections: tuple[Connection, Connection]) -> None:
        ours, theirs = connections
        data = pattern(LARGE)
        with in_thread(ours.send, Note("large"), [data], timeout=PATIENCE) as sent:
            incoming = theirs.receive(timeout=PATIENCE)
            sent.result(PATIENCE)
        assert b"".join(incoming.payload) == data

    def test_large_metadata(self, connections: tuple[Connection, Connection]) -> None:
        ours, theirs = connections
        text = "trireme " * 200_000
        with in_thread(ours.send, Note(text), [b"tail"], timeout=PATIENCE) as sent:
            incoming = theirs.receive(timeout=PATIENCE)
            sent.result(PATIENCE)
        assert incoming.message == Note(text)
        assert b"".join(incoming.payload) == b"tail"
        ours.send(Note("after"), timeout=PATIENCE)
        assert theirs.receive(timeout=PATIENCE).message == Note("after")

    def test_scattered_and_gathered(self, connections: tuple[Connection, Connection]) -> None:
        ours, theirs = connections
        data = pattern(300_000)
        places = [memoryview(bytearray(size)) for size in (1, 99_999, 0, 200_000)]
        theirs.destination = lambda message, length: places
        sizes = [7] * 3000
        pieces = [data[i * 7 : i * 7 + 7] for i in range(3000)] + [b"", data[sum(sizes) :]]
        with in_thread(ours.send, Note(), pieces, timeout=PATIENCE) as sent:
            incoming = theirs.receive(timeout=PATIENCE)
            sent.result(PATIENCE)
        assert list(incoming.payload) == places
        assert b"".join(places) == data

    def test_a_payload_is_received_in_place(
        self, connections: tuple[Connection, Connection]
    ) -> None:
        ours, theirs = connections
        memory = bytearray(b"." * 100_000)
        asked: list[tuple[Message, int]] = []

        def destination(message: Message, length: int) -> Sequence[memoryview]:
            asked.append((message, length))
            return [memoryview(memory)[10 : 10 + length]]

        theirs.destination = destination
        data = pattern(99_980)
        ours.send(Note("here"), [data], timeout=PATIENCE)
        theirs.receive(timeout=PATIENCE)
        assert asked == [(Note("here"), 99_980)]
        assert memory == b"." * 10 + data + b"." * 10

    def test_both_send_at_once(self, connections: tuple[Connection, Connection]) -> None:
        ours, theirs = connections
        one, other = pattern(LARGE, 1), pattern(LARGE, 2)
        assert not ours.offer(Note("one"), [one])
        assert not theirs.offer(Note("other"), [other])
        with in_thread(receive_and_flush, ours) as received:
            incoming = receive_and_flush(theirs)
            back = received.result(PATIENCE)
        assert incoming.message == Note("one") and back.message == Note("other")
        assert b"".join(incoming.payload) == one
        assert b"".join(back.payload) == other

    def test_back_pressure(self, connections: tuple[Connection, Connection]) -> None:
        ours, theirs = connections
        memory = bytearray(pattern(LARGE))
        assert not ours.offer(Note("0"), [memory])
        memory[:] = bytes(LARGE)  # the rest of it was kept
        assert not ours.offer(Note("1"), [b"small"])
        assert not ours.offer(Note("2"))
        assert ours.unsent
        assert 0 < ours.unsent < LARGE + 200
        first = poll_until(theirs, ours)
        assert b"".join(first.payload) == pattern(LARGE)
        assert poll_until(theirs, ours).message == Note("1")
        assert poll_until(theirs, ours).message == Note("2")
        assert ours.flush()
        assert not ours.unsent
        assert ours.unsent == 0
        assert ours.offer(Note("3"))
        assert theirs.receive(timeout=PATIENCE).message == Note("3")
        assert ours.bytes_sent == theirs.bytes_received

    def test_send_keeps_behind_what_was_offered(
        self, connections: tuple[Connection, Connection]
    ) -> None:
        ours, theirs = connections
        assert not ours.offer(Note("first"), [bytes(LARGE)])
        with in_thread(ours.send, Note("second"), [b"tail"], timeout=PATIENCE) as sent:
            assert theirs.receive(timeout=PATIENCE).message == Note("first")
            assert theirs.receive(timeout=PATIENCE).message == Note("second")
            sent.result(PATIENCE)

    def test_a_receive_goes_on_after_its_timeout(self, streams: tuple[Stream, Stream]) -> None:
        ours, theirs = streams
        receiver = Connection(theirs, CATALOG)
        frame = frame_of(Note("slow"), pattern(5000), sequence=9)
        for cut in (0, 5, 28, 30, 33, 2000, len(frame) - 1):
            write_all(ours, frame[:cut])
            with pytest.raises(WireTimeout, match="no complete message within"):
                receiver.receive(timeout=0.01)
            write_all(ours, frame[cut:])
            incoming = receiver.receive(timeout=PATIENCE)
            assert incoming.message == Note("slow")
            assert incoming.sequence == 9
            assert b"".join(incoming.payload) == pattern(5000)

    def test_a_send_that_times_out_ends_sending(
        self, connections: tuple[Connection, Connection]
    ) -> None:
        ours, theirs = connections
        theirs.send(Note("said before"), timeout=PATIENCE)
        with pytest.raises(WireTimeout, match="did not take"):
            ours.send(Note(), [bytes(LARGE)], timeout=0.05)
        with pytest.raises(ConnectionBroken, match="earlier send"):
            ours.send(Note(), timeout=PATIENCE)
        with pytest.raises(ConnectionBroken, match="earlier send"):
            ours.offer(Note())
        assert ours.receive(timeout=PATIENCE).message == Note("said before")

    def test_a_send_that_waits_is_given_up_for_a_reason_of_its_callers(
        self, connections: tuple[Connection, Connection]
    ) -> None:
        ours, _ = connections
        checks = iter([None, None, LookupError("there is no use in it")])

        def check() -> None:
            if (error := next(checks)) is not None:
                raise error

        with pytest.raises(LookupError, match="no use"):
            ours.send(Note(), [bytes(LARGE)], timeout=PATIENCE, check=check)
        with pytest.raises(ConnectionBroken, match="earlier send was given up: there is no use"):
            ours.send(Note(), timeout=PATIENCE)

    def test_closed_by_me(self, connections: tuple[Connection, Connection]) -> None:
        ours, _ = connections
        assert not ours.offer(Note(), [bytes(LARGE)])
        ours.close()
        ours.close()
        assert not ours.unsent
        for use in (
            lambda: ours.send(Note(), timeout=PATIENCE),
            lambda: ours.offer(Note()),
            lambda: ours.receive(timeout=PATIENCE),
            ours.flush,
            ours.poll,
        ):
            with pytest.raises(ConnectionClosed, match="this side"):
                use()

    def test_closed_by_the_peer(self, connections: tuple[Connection, Connection]) -> None:
        ours, theirs = connections
        theirs.send(Note("bye"), [b"payload"], timeout=PATIENCE)
        theirs.close()
        assert ours.receive(timeout=PATIENCE).message == Note("bye")
        for _ in range(2):
            with pytest.raises(PeerClosed, match="closed"):
                ours.receive(timeout=PATIENCE)

    @pytest.mark.parametrize("cut", [1, 27, 28, 32, 2000, 7999])
    def test_closed_inside_a_message(self, streams: tuple[Stream, Stream], cut: int) -> None:
        ours, theirs = streams
        receiver = Connection(theirs, CATALOG)
        frame = frame_of(Note("cut short"), pattern(8000 - 28 - 11))
        assert len(frame) == 8000
        write_all(ours, frame[:cut])
        ours.close()
        for _ in range(2):
            with pytest.raises(ConnectionBroken, match="inside a message"):
                receiver.receive(timeout=PATIENCE)

    def test_what_came_before_the_end_is_read_after_a_failed_send(
        self, connections: tuple[Connection, Connection]
    ) -> None:
        ours, theirs = connections
        theirs.send(Note("why I go"), timeout=PATIENCE)
        theirs.close()
        with pytest.raises((PeerClosed, ConnectionBroken)):
            while True:
                ours.send(Note(), [bytes(1 << 20)], timeout=PATIENCE)
        assert ours.receive(timeout=PATIENCE).message == Note("why I go")

    def test_a_frame_over_the_limits_is_refused(
        self, connections: tuple[Connection, Connection]
    ) -> None:
        ours, theirs = connections
        theirs.limits = Limits(metadata=100, payload=1000)
        ours.send(Note("fits"), [bytes(1000)], timeout=PATIENCE)
        assert theirs.receive(timeout=PATIENCE).nbytes == 1000
        ours.send(Note("does not fit"), [bytes(1001)], timeout=PATIENCE)
        for _ in range(2):
            with pytest.raises(FrameError, match="payload of 1001 bytes; at most 1000"):
                theirs.receive(timeout=PATIENCE)

    def test_a_destination_may_refuse(self, connections: tuple[Connection, Connection]) -> None:
        ours, theirs = connections

        def refuse(message: Message, length: int) -> Sequence[memoryview]:
            raise FrameError(f"no room for {length} bytes")

        theirs.destination = refuse
        ours.send(Note(), timeout=PATIENCE)
        assert theirs.receive(timeout=PATIENCE).nbytes == 0
        ours.send(Note(), [bytes(8)], timeout=PATIENCE)
        with pytest.raises(FrameError, match="no room for 8 bytes"):
            theirs.receive(timeout=PATIENCE)

    def test_receive_wakes_when_the_last_byte_comes(
        self, connections: tuple[Connection, Connection]
    ) -> None:
        ours, theirs = connections
        started = threading.Event()

        def receive() -> Incoming:
            started.set()
            return theirs.receive(timeout=PATIENCE)

        with in_thread(receive) as received:
            assert started.wait(PATIENCE)
            ours.send(Note("wake"), timeout=PATIENCE)
            assert received.result(PATIENCE).message == Note("wake")


def frame_of(message: Message, payload: bytes = b"", sequence: int = 0) -> bytes:
    """The bytes of a frame."""
    metadata = CATALOG.encode(message)
    return pack_header(message.kind, len(metadata), len(payload), sequence) + metadata + payload


@contextmanager
def in_thread(
    function: Callable[..., object], *args: object, **options: object
) -> Iterator[Future[Any]]:
    """Runs a function in a thread; the block ends when it has."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(function, *args, **options)
