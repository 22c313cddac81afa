"""Which steps after the end are left out, and which are a mistake."""

from __future__ import annotations

from trireme.session.worker.stopping import LastIteration


def test_a_loop_that_never_asks_would_go_on_for_nothing() -> None:
    assert not LastIteration().leaves_out()


def test_steps_are_left_out_until_the_loop_is_told() -> None:
    last = LastIteration()
    assert last.asked(False) is False
    assert last.leaves_out() and last.leaves_out()
    assert last.asked(True) is True
    assert not last.leaves_out()


def test_an_iteration_without_end_is_ended() -> None:
    last = LastIteration()
    last.asked(False)
    assert sum(last.leaves_out() for _ in range(5000)) == 1000
