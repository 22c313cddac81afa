from __future__ import annotations

import select
import socket
from collections.abc import Iterator

import pytest

from trireme.wire.polling import READABLE, WRITABLE, Poller, SpinWait, Wakeup


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


YIELD = 0.25


class World:
    """A core that others use for a while at each yield, and something that comes at some time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.comes = float("inf")
        self.looks = 0
        self.slept = 0.0
        monkeypatch.setattr("trireme.wire.polling.time.monotonic", lambda: self.now)
        monkeypatch.setattr("trireme.wire.polling.os.sched_yield", self.give_away)

    def give_away(self) -> None:
        self.now += YIELD

    def poll(self, milliseconds: int) -> bool:
        if not milliseconds:
            self.looks += 1
        slept = min(milliseconds / 1000, max(self.comes - self.now, 0.0))
        self.slept += slept
        self.now += slept
        return self.now >= self.comes


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_what_is_there_is_seen_at_once(world: World) -> None:
    world.comes = 0.0
    assert SpinWait(least=1.0, most=1.0).wait(world.poll, 10.0)
    assert (world.looks, world.now) == (1, 100.0)


def test_what_comes_while_one_looks_needs_no_sleep(world: World) -> None:
    world.comes = 100.6
    assert SpinWait(least=1.0, most=1.0).wait(world.poll, 10.0)
    assert (world.now, world.slept) == (100.75, 0.0)


@pytest.mark.parametrize(("computed", "looked"), [(0.0, 1.0), (3.0, 1.0), (8.0, 2.0), (1e9, 5.0)])
def test_who_computes_long_looks_long(world: World, computed: float, looked: float) -> None:
    spin = SpinWait(least=1.0, most=5.0, share=0.25)
    world.now += computed
    world.comes = world.now + 50.0
    assert spin.wait(world.poll, 100.0)
    assert world.slept == pytest.approx(50.0 - looked)


def test_waiting_is_not_computing(world: World) -> None:
    spin = SpinWait(least=1.0, most=5.0, share=0.25)
    world.comes = world.now + 40.0
    assert spin.wait(world.poll, 100.0, look=False)
    assert (world.looks, world.slept) == (0, 40.0)
    world.comes = world.now + 40.0
    assert spin.wait(world.poll, 100.0)
    assert world.slept == pytest.approx(40.0 + 39.0)
    world.comes = world.now + 2 * YIELD
    assert spin.wait(world.poll, 100.0)
    world.comes = world.now + 40.0
    assert spin.wait(world.poll, 100.0)
    assert world.slept == pytest.approx(40.0 + 39.0 + 39.0), "nor is looking"


@pytest.mark.parametrize("look", [True, False])
@pytest.mark.parametrize("seconds", [0.5, 3.0])
def test_looking_and_sleeping_take_no_longer_than_they_may(
    world: World, seconds: float, look: bool
) -> None:
    assert not SpinWait(least=2.0, most=2.0).wait(world.poll, seconds, look=look)
    assert world.now == 100.0 + seconds


def test_it_is_readable_from_a_wake_to_the_next_drain() -> None:
    wakeup = Wakeup()

    def readable() -> bool:
        return bool(select.select([wakeup], [], [], 0)[0])

    assert not readable()
    for _ in range(100_000):  # more than the socket holds
        wakeup.wake()
    assert readable()
    while readable():
        wakeup.drain()
    wakeup.drain()
    wakeup.wake()
    assert readable()
    wakeup.close()
    wakeup.wake()
