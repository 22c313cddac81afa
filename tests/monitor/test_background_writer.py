"""Who writes is never stopped by a terminal or a disk that takes nothing."""

from __future__ import annotations

import io
import logging
import os
import threading

from trireme.monitor.background_writer import BackgroundHandler, BackgroundWriter


def test_writes_are_carried_out_in_order_and_all_before_the_end() -> None:
    done: list[int] = []
    with BackgroundWriter("test") as writer:
        for number in range(100):
            writer.put(lambda number=number: done.append(number))
    assert done == list(range(100)) and writer.dropped == 0


def test_what_finds_no_room_is_dropped_and_counted() -> None:
    entered, release, done = threading.Event(), threading.Event(), list[int]()

    def hang() -> None:
        entered.set()
        release.wait(30.0)

    writer = BackgroundWriter("test", capacity=3)
    writer.put(hang)
    assert entered.wait(30.0)
    for number in range(10):
        writer.put(lambda number=number: done.append(number))
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
    assert done == [1] and writer.dropped == 1


def test_a_log_says_how_many_lines_were_dropped_when_its_pipe_is_read_again() -> None:
    outlet, inlet = os.pipe()
    os.set_blocking(outlet, False)
    stream = io.TextIOWrapper(os.fdopen(inlet, "wb", buffering=0), write_through=True)
    writer = BackgroundWriter("test", capacity=2)
    handler = BackgroundHandler(writer, stream)
    handler.setFormatter(logging.Formatter("ps:0 %(message)s"))
    log = logging.Logger("test")
    log.addHandler(handler)
    for _ in range(40):  # a pipe takes 64 KiB; nobody is stopped
        log.warning("x" * 8192)
    assert writer.dropped > 20
    said = b""
    while b"lines were dropped" not in said:
        try:
            said += os.read(outlet, 1 << 20)
        except BlockingIOError:
            log.warning("more")
    assert b"ps:0 " in said
    writer.close(30.0)
    stream.close()
    os.close(outlet)
