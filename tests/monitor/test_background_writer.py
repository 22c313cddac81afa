"""Who writes is never stopped by a terminal or a disk that takes nothing."""

from __future__ import annotations

import threading

from trireme.monitor.background_writer import BackgroundWriter


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
    for number in range(10):
        writer.put(lambda number=number: done.append(number))
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
