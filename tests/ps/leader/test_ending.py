"""When a job ends: at exactly its last step, and without an update too many or one lost."""

from __future__ import annotations

import random

import pytest

from trireme.ps.leader.ending import Ending


def ending(last: int | None, *, synchronous: bool = False) -> Ending:
    made = Ending()
    made.synchronous = synchronous
    if last is not None:
        made.set_last(0, last)
    return made


def test_no_more_updates_are_let_begin_than_steps_are_left() -> None:
    end = ending(5)
    assert end.grant(0, 3)
    assert end.grant(1, 3)
    assert not end.grant(2, 3)
    assert end.grant(0, 3), "it has its own already"
    end.done(0)
    assert end.grant(2, 3)
    assert end.under_way == {1, 2}


def test_in_rounds_all_updates_under_way_make_one_step() -> None:
    end = ending(5, synchronous=True)
    assert all(end.grant(worker, 4) for worker in range(7))
    assert not end.grant(0, 5)
    assert end.under_way == set(range(1, 7))


@pytest.mark.parametrize(("synchronous", "soonest"), [(False, 12), (True, 11)])
def test_a_stop_loses_no_update_under_way(synchronous: bool, soonest: int) -> None:
    end = ending(None, synchronous=synchronous)
    end.grant(0, 10)
    end.grant(1, 10)
    assert end.stop(10) == soonest
    assert not end.reached(10)
    assert end.reached(soonest)
    assert end.stop(10) == soonest


def test_a_stop_with_nothing_under_way_is_at_once() -> None:
    end = ending(None)
    assert end.stop(4) == 4
    assert end.reached(4)


def test_an_earlier_end_stays() -> None:
    end = ending(6)
    for worker in range(4):
        end.grant(worker, 2)
    assert end.stop(2) == 6
    end.set_last(2, 100)
    assert end.last == 6


def test_a_late_end_loses_no_update_under_way() -> None:
    end = ending(None)
    end.grant(0, 10)
    end.set_last(10, 3)
    assert end.last == 11
    end.set_last(10, 3)
    assert end.last == 11


@pytest.mark.parametrize("seed", range(50))
def test_the_last_step_is_reached_exactly_whatever_the_order(seed: int) -> None:
    rng = random.Random(seed)
    last, step, end = rng.randint(0, 20), 0, ending(None)
    end.set_last(0, last)
    waiting = set(range(rng.randint(1, 6)))
    training: set[int] = set()
    while waiting or training:
        worker = rng.choice(sorted(waiting | training))
        if worker in training:
            step += 1
            training.discard(worker)
            end.done(worker)
            waiting.add(worker)
        elif end.grant(worker, step):
            waiting.discard(worker)
            training.add(worker)
        elif not training:
            break
    assert step == last


def test_an_update_of_several_steps_counts_for_as_many() -> None:
    end = ending(8)
    end.period = 4
    assert end.grant(0, 0)
    assert end.grant(1, 0)
    assert not end.grant(2, 0)
    end.done(1)
    assert end.grant(2, 0)
    assert end.stop(0) == 8
    end.done(0)
    assert end.stop(1) == 5, "one is under way"
    end = ending(None)
    end.period = 4
    end.grant(0, 3)
    assert end.stop(3) == 7
    assert end.last == 7


def test_who_would_be_too_many_waits_for_those_under_way() -> None:
    end = ending(5)
    end.grant(0, 3)
    assert not end.undecided(1, 3), "it is the second of two"
    end.grant(1, 3)
    assert end.undecided(2, 3), "one of the two may be lost"
    assert not end.undecided(0, 3), "its own is one of them"
    assert not end.undecided(2, 5), "nothing is to be done"
    end.done(0)
    assert end.undecided(2, 4)
    assert not end.undecided(2, 3)


@pytest.mark.parametrize(("synchronous", "last"), [(True, 5), (False, None)])
def test_nobody_waits_where_nothing_is_waited_for(synchronous: bool, last: int | None) -> None:
    end = ending(last)
    end.synchronous = synchronous
    end.grant(0, 4)
    assert not end.undecided(1, 4)


def test_who_is_not_let_go_on_has_nothing_under_way() -> None:
    end = ending(5)
    end.grant(0, 3)
    assert not end.grant(0, 5)
    assert end.under_way == set()
    end.done(0)
    end.done(7)
    assert end.grant(1, 4)


def test_the_end_is_reached_at_the_last_step_and_after_it() -> None:
    end = ending(5)
    assert [end.reached(step) for step in (4, 5, 6)] == [False, True, True]
    assert not ending(None).reached(100)
    assert not Ending().undecided(0, 0)
