"""What counts as a sign that a server's loop goes on."""

from __future__ import annotations

import math
import sys
import threading

import pytest

from trireme.cluster.progress import BUSY, STEPS
from trireme.ps.server.loop_watch import LoopWatch
from trireme.ps.server.service import _seconds_of


def test_each_look_at_a_loop_that_turns_is_a_sign() -> None:
    watch = LoopWatch(10.0, 600.0)
    assert watch.signs == 0
    for second in range(30):
        assert watch.look(100.0 + second, turns=10 * second, worked=0.0)
        assert watch.signs == second + 1
    assert not watch.overdue


def test_a_loop_that_neither_turns_nor_works_is_overdue() -> None:
    watch = LoopWatch(10.0, 600.0)
    watch.look(100.0, 5, 1.0)
    for second in range(1, 10):
        assert not watch.look(100.0 + second, 5, 1.0)
        assert not watch.overdue
    watch.look(110.0, 5, 1.001)  # as little as the thread takes that looks
    assert watch.overdue and watch.signs == 1
    assert watch.look(111.0, 6, 1.001)
    assert not watch.overdue and watch.signs == 2


def test_a_turn_that_takes_long_and_works_is_no_standstill() -> None:
    watch = LoopWatch(10.0, 600.0)
    for second in range(599):
        assert watch.look(100.0 + second, 5, 0.05 * second)
    assert not watch.overdue


def test_work_without_a_turn_counts_for_so_long_only() -> None:
    for longest, ends in ((60.0, True), (math.inf, False)):
        watch = LoopWatch(10.0, longest)
        for second in range(80):
            watch.look(100.0 + second, 5, 0.9 * second)
        assert watch.overdue == ends


def busy_after(*turns: float) -> list[bool]:
    """Returns whether a loop with a patience of 10 s is busy, for each second of its turns."""
    watch, busy, made, ends = LoopWatch(10.0, 600.0), list[bool](), 0, list[float]()
    for each in turns:
        ends.append(each + (ends[-1] if ends else 0.0))
    for second in range(round(ends[-1])):
        made = sum(end <= second for end in ends)
        watch.look(100.0 + second, made, float(second))
        busy.append(BUSY in watch.status)
    return busy


def test_a_loop_with_short_turns_is_not_busy() -> None:
    assert not any(busy_after(*[0.125] * 300))
    assert not any(busy_after(*[1.9] * 30))


def test_a_loop_is_busy_within_a_long_turn_and_while_it_catches_up() -> None:
    busy = busy_after(*[0.125] * 16, 30.0, *[0.125] * 160)
    last = len(busy) - 1 - busy[::-1].index(True)
    assert busy.index(True) == 2 + 3
    assert all(busy[5:last]) and last == 2 + 30 + 7 - 1


def test_a_loop_of_long_turns_is_busy_between_them_too() -> None:
    assert all(busy_after(*[4.0] * 10)[6:])


def test_a_process_that_was_stopped_has_to_catch_up() -> None:
    watch = LoopWatch(10.0, 600.0)
    for second in range(5):
        watch.look(100.0 + second, 10 * second, 0.0)
    watch.look(113.0, 41, 0.0)  # one turn, and one look, since
    assert watch.status == {STEPS: 6, BUSY: 1}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a thread's processor time")
def test_a_thread_that_computes_uses_the_processor_and_one_that_waits_does_not() -> None:
    release, waits, computes = threading.Event(), threading.Event(), threading.Event()

    def wait() -> None:
        waits.set()
        release.wait(60.0)

    def compute() -> None:
        while not release.is_set():
            computes.set()

    threads = [threading.Thread(target=target) for target in (wait, compute)]
    for thread in threads:
        thread.start()
    assert waits.wait(60.0) and computes.wait(60.0)
    idle, busy = (thread.ident or 0 for thread in threads)
    before, first = _seconds_of(idle), _seconds_of(busy)
    while _seconds_of(busy) < first + 0.2:
        pass
    assert _seconds_of(idle) < before + 0.05
    release.set()
    for thread in threads:
        thread.join(60.0)
