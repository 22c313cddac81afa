"""What counts as a sign that a server's loop goes on."""

from __future__ import annotations

import math

from trireme.ps.server.loop_watch import LoopWatch


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
