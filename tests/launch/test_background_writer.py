"""Who writes is never stopped by a terminal or a disk that takes nothing."""

from __future__ import annotations

import threading
import time
from functools import partial

from trireme.launch.background_writer import BackgroundWriter


def test_writes_are_carried_out_in_order_and_all_before_the_end() -> None:
    done: list[int] = []
    with BackgroundWriter("test") as writer:
        for number in range(100):
            writer.put(lambda number=number: done.append(number))
    assert done == list(range(100))


def test_what_finds_no_room_is_dropped() -> None:
    entered, release, done = threading.Event(), threading.Event(), list[int]()

    def hang() -> None:
        entered.set()
        release.wait(30.0)

    writer = BackgroundWriter("test", capacity=3)
    writer.put(hang)
    assert entered.wait(30.0)
    room = [writer.put(lambda number=number: done.append(number)) for number in range(10)]
    assert room == [True] * 3 + [False] * 7
    assert writer.dropped == 7
    writer.close(0.0)  # waits for nobody
    release.set()
    writer.close(30.0)
    assert done == [0, 1, 2]


def test_a_write_that_fails_ends_nothing() -> None:
    done: list[int] = []

    def fail() -> None:
        raise BrokenPipeError

    with BackgroundWriter("test") as writer:
        writer.put(fail)
        writer.put(lambda: done.append(1))
    assert done == [1]


def test_who_waits_for_room_waits_once_while_nothing_is_taken() -> None:
    entered, release = threading.Event(), threading.Event()

    def hang() -> None:
        entered.set()
        release.wait(30.0)

    writer = BackgroundWriter("test", capacity=1, patience=0.5)
    writer.put(hang)
    assert entered.wait(30.0)
    assert writer.put(lambda: None)
    began = time.monotonic()
    assert not any([writer.put(lambda: None) for _ in range(1000)])
    assert 0.5 <= time.monotonic() - began < 5.0
    release.set()
    writer.close(30.0)


def test_writes_that_come_too_fast_wait_for_room() -> None:
    done: list[int] = []
    with BackgroundWriter("test", capacity=2, patience=30.0) as writer:
        assert all([writer.put(lambda n=n: done.append(n)) for n in range(1000)])
    assert done == list(range(1000))


def test_the_end_waits_as_long_as_each_write_takes_less() -> None:
    done, slow = list[int](), threading.Event()

    def take(number: int) -> None:
        slow.wait(0.05)  # nobody sets it: so long takes each write
        done.append(number)

    writer = BackgroundWriter("test")
    for number in range(20):
        writer.put(partial(take, number))
    writer.close(0.5)
    assert len(done) == 20
