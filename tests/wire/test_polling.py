from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from trireme.wire.polling import READABLE, WRITABLE, Poller


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair()
    with here, there:
        yield here, there


@pytest.fixture
def poller() -> Iterator[Poller]:
    poller = Poller()
    yield poller
    poller.close()


def handle(poller: Poller, seconds: float) -> bool:
    """Calls the callbacks of the events that come; returns whether there were any."""
    happened = False
    for callback, mask in poller.events(seconds):
        callback(mask)
        happened = True
    return happened


def test_it_calls_who_waits(poller: Poller, pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = pair
    masks: list[int] = []
    poller.register(here.fileno(), READABLE, masks.append)
    assert not handle(poller, 0)
    there.send(b"x")
    assert handle(poller, 20.0)
    poller.modify(here.fileno(), WRITABLE)
    assert handle(poller, 20.0)
    poller.modify(here.fileno(), READABLE | WRITABLE)
    assert handle(poller, 20.0)
    assert masks == [READABLE, WRITABLE, READABLE | WRITABLE]
    poller.unregister(here.fileno())
    assert not handle(poller, 0)


def test_a_hang_up_is_told_to_writers(
    poller: Poller, pair: tuple[socket.socket, socket.socket]
) -> None:
    here, there = pair
    masks: list[int] = []
    poller.register(here.fileno(), 0, masks.append)
    there.close()
    assert handle(poller, 20.0)
    assert masks and not masks[0] & (READABLE | WRITABLE)


def test_one_callback_may_end_another(poller: Poller) -> None:
    """Both have something; whoever comes first takes the other away."""
    pairs = [socket.socketpair() for _ in range(2)]
    called: list[int] = []

    def call(number: int) -> None:
        called.append(number)
        other = pairs[1 - number][0]
        poller.unregister(other.fileno())
        other.close()

    for number, (here, there) in enumerate(pairs):
        poller.register(here.fileno(), READABLE, lambda mask, number=number: call(number))
        there.send(b"x")
    assert handle(poller, 20.0)
    assert len(called) == 1
    for pair in pairs:
        for end in pair:
            end.close()


def test_it_waits_no_longer_than_told(poller: Poller) -> None:
    assert not handle(poller, 0.001)
