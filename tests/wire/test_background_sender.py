"""Frames whose payloads become known little by little, over real sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from tests.clocks import VirtualClock
from tests.conformance import CATALOG, PATIENCE, Note
from trireme.errors import ConnectionBroken, PeerClosed, WireError, WireTimeout
from trireme.wire.background_sender import BackgroundSender
from trireme.wire.connection import Connection
from trireme.wire.transports.socket_stream import SocketStream

Pair = tuple[Connection, Connection]

LARGE = 32 << 20  # more than sockets of one host hold


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    ends = [socket.socketpair() for _ in range(2)]
    pairs = [
        (Connection(SocketStream(a, "near"), CATALOG), Connection(SocketStream(b, "far"), CATALOG))
        for a, b in ends
    ]
    yield pairs
    for pair in pairs:
        for end in pair:
            end.close()


def receive_all(connections: list[Connection], messages: list[bytes]) -> threading.Thread:
    def run() -> None:
        for connection in connections:
            incoming = connection.receive(timeout=PATIENCE)
            messages.append(b"".join(incoming.payload))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_frames_arrive_as_if_they_had_been_sent_at_once(pairs: list[Pair]) -> None:
    got: list[bytes] = []
    thread = receive_all([far for _, far in pairs], got)
    for number, (near, _) in enumerate(pairs):
        near.begin(Note("piecewise"), 6, sequence=number)
    sender = BackgroundSender([near for near, _ in pairs])
    for piece in (b"ab", b"", b"cde", b"f"):
        for index in range(len(pairs)):
            sender.give(index, [memoryview(piece)])
    assert sender.finish(PATIENCE) == [None, None]
    thread.join(PATIENCE)
    assert got == [b"abcdef"] * 2
    for near, far in pairs:
        assert not near.in_frame
        near.send(Note("next"), [b"whole"], sequence=9, timeout=PATIENCE)
        assert far.receive(timeout=PATIENCE).message == Note("next")


def test_what_a_socket_does_not_hold_is_sent_while_the_owner_does_something_else(
    pairs: list[Pair],
) -> None:
    got: list[bytes] = []
    thread = receive_all([far for _, far in pairs], got)
    payload = memoryview(bytes(range(256)) * (LARGE // 256))
    for near, _ in pairs:
        near.begin(Note("large"), LARGE + 1)
    sender = BackgroundSender([near for near, _ in pairs])
    for index in range(2):
        sender.give(index, [payload])
    for index in range(2):
        sender.give(index, [memoryview(b"!")])
    assert sender.finish(PATIENCE) == [None, None]
    thread.join(PATIENCE)
    assert got == [bytes(payload) + b"!"] * 2


def test_a_part_of_a_frame_is_nothing_to_the_peer(pairs: list[Pair]) -> None:
    near, far = pairs[0]
    near.begin(Note("never"), 8)
    sender = BackgroundSender([near])
    sender.give(0, [memoryview(b"1234567")])
    assert sender.finish(PATIENCE) == [None]
    assert near.in_frame
    with pytest.raises(WireTimeout):
        far.receive(timeout=0.01)
    near.close()
    with pytest.raises(ConnectionBroken, match="inside a message"):
        far.receive(timeout=PATIENCE)


def test_one_that_breaks_does_not_keep_the_others_up(pairs: list[Pair]) -> None:
    (one, gone), (other, far) = pairs
    got: list[bytes] = []
    thread = receive_all([far], got)
    gone.close()
    for near in (one, other):
        near.begin(Note("n"), 4)
    sender = BackgroundSender([one, other])
    for index in range(2):
        sender.give(index, [memoryview(b"abcd")])
    failures = sender.finish(PATIENCE)
    assert isinstance(failures[0], (PeerClosed, ConnectionBroken))
    assert failures[1] is None
    thread.join(PATIENCE)
    assert got == [b"abcd"]


def test_a_peer_that_takes_nothing_has_failed_at_the_deadline(pairs: list[Pair]) -> None:
    near, _ = pairs[0]
    near.begin(Note("n"), LARGE)
    sender = BackgroundSender([near])
    sender.give(0, [memoryview(bytes(LARGE))])
    (failure,) = sender.finish(0.05)
    assert isinstance(failure, WireTimeout)
    assert "within 0.05 s" in str(failure)


def test_a_peer_that_is_gone_is_not_waited_for_and_the_others_are(pairs: list[Pair]) -> None:
    for near, _ in pairs:
        near.begin(Note("n"), LARGE)
    sender = BackgroundSender([near for near, _ in pairs], clock=VirtualClock())
    for index in range(2):
        sender.give(index, [memoryview(bytes(LARGE))])
    got: list[bytes] = []
    threads: list[threading.Thread] = []

    def gone(index: int) -> bool:
        if index == 0 and not threads:
            threads.append(receive_all([pairs[1][1]], got))
        return index == 0

    failures = sender.finish(PATIENCE, gone)
    assert isinstance(failures[0], ConnectionBroken) and "near is gone" in str(failures[0])
    assert failures[1] is None
    threads[0].join(PATIENCE)
    assert got == [bytes(LARGE)]


def test_stopping_does_not_wait_for_the_peer(pairs: list[Pair]) -> None:
    near, _ = pairs[0]
    near.begin(Note("n"), LARGE)
    sender = BackgroundSender([near], clock=VirtualClock())
    sender.give(0, [memoryview(bytes(LARGE))])
    sender.stop()
    assert not sender._thread.is_alive()
    assert near.in_frame


def test_a_mistake_of_the_owners_is_raised_to_it(pairs: list[Pair]) -> None:
    near, _ = pairs[0]
    near.begin(Note("n"), 1)
    sender = BackgroundSender([near])
    sender.give(0, [memoryview(b"too much")])
    with pytest.raises(ValueError, match="expects 1 bytes and is given 8"):
        sender.finish(PATIENCE)


def test_nothing_else_is_sent_inside_a_frame(pairs: list[Pair]) -> None:
    near, _ = pairs[0]
    near.begin(Note("n"), 2)
    for send in (
        lambda: near.send(Note("m"), timeout=1.0),
        lambda: near.offer(Note("m")),
        lambda: near.begin(Note("m"), 1),
    ):
        with pytest.raises(ValueError, match="begun and is not complete"):
            send()
    near.close()
    assert not near.in_frame
    with pytest.raises(WireError):
        near.advance()


def test_a_frame_is_not_begun_before_what_was_offered_is_sent(pairs: list[Pair]) -> None:
    near, _ = pairs[0]
    assert not near.offer(Note("n"), [bytes(LARGE)])
    with pytest.raises(ValueError, match="is not sent yet"):
        near.begin(Note("m"), 1)
