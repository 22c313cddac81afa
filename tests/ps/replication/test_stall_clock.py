"""Who makes no progress, by how often it was looked at."""

from __future__ import annotations

from trireme.ps.replication.stall_clock import StallClock


def look(clock: StallClock, start: float, seconds: float, marks: dict[int, object]) -> None:
    for tenth in range(round(10 * seconds) + 1):
        clock.look(start + tenth / 10, marks)  # type: ignore[arg-type]


def test_who_owes_something_and_makes_no_progress_is_overdue() -> None:
    clock = StallClock(3.0)
    look(clock, 0.0, 2.8, {1: None, 2: "a"})
    assert clock.overdue == set()
    clock.look(2.9, {1: None, 2: "b"})  # 2 has made progress
    look(clock, 3.0, 0.5, {1: None, 2: "b"})
    assert clock.overdue == {1}


def test_who_owes_nothing_any_more_is_not_overdue_and_begins_anew() -> None:
    clock = StallClock(1.0)
    look(clock, 0.0, 2.0, {1: "a"})
    assert clock.overdue == {1}
    clock.look(2.1, {})
    assert clock.overdue == set()
    look(clock, 2.2, 0.5, {1: "a"})
    assert clock.overdue == set()


def test_the_time_in_which_nobody_looked_does_not_count() -> None:
    """A server that applies a large update for 20 s has read no confirmations meanwhile."""
    clock = StallClock(3.0)
    clock.look(0.0, {1: "a"})
    clock.look(20.0, {1: "a"})
    assert clock.overdue == set()
    look(clock, 20.1, 2.5, {1: "a"})
    assert clock.overdue == {1}


def test_one_long_turn_of_the_reporter_is_not_the_silence_of_others() -> None:
    clock = StallClock[int](1.0)
    for now in (0.0, 0.1, 5.0, 5.1):
        clock.look(now, {1: "no progress"})
    assert clock.overdue == frozenset()
    for now in (6.0, 7.0, 8.0):
        clock.look(now, {1: "no progress"})
    assert clock.overdue == {1}
