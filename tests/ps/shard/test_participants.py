"""Who takes part, by the newest view."""

from __future__ import annotations

from trireme.cluster.view import View, WorkerEntry
from trireme.ps.shard.participants import Participant, Participants


def view(number: int, *workers: tuple[int, int]) -> View:
    return View(number, (), tuple(WorkerEntry(*worker) for worker in workers))


def test_who_stays_is_who_was_there_with_the_same_start() -> None:
    participants = Participants()
    assert participants.take(view(1, (0, 1), (1, 1), (2, 1))) == set()
    assert participants.take(view(2, (0, 1), (1, 2), (3, 1))) == {0}
    assert participants.live == {0: 1, 1: 2, 3: 1}
    assert participants.holds(Participant(1, 2))
    assert not participants.holds(Participant(1, 1))
    assert not participants.holds(Participant(2, 1))


def test_who_has_retired_stays_but_trains_no_more() -> None:
    participants = Participants()
    participants.take(view(1, (0, 1), (1, 1)))
    participants.retire(1)
    assert participants.live == {0: 1}
    participants.take(view(2, (0, 1), (1, 1)))
    assert participants.live == {0: 1}
    participants.take(view(3, (0, 1), (1, 2)))
    assert participants.live == {0: 1, 1: 2}, "a new process has not retired"


def test_a_request_is_fenced_off_with_a_reason() -> None:
    participants = Participants()
    participants.take(view(4, (0, 1), (1, 3)))
    assert participants.fence(Participant(1, 3), 4) is None
    assert participants.fence(Participant(2, 1), 4) == "worker:2 is not in view 4"
    assert participants.fence(Participant(1, 2), 4) == "worker:1 was started anew: 3 has replaced 2"
    assert participants.fence(Participant(1, 3), 3) == "view 3 is not the present one, 4"
    assert participants.fence(Participant(1, 3), 5) == "view 5 is not the present one, 4"


def test_before_the_first_view_there_is_nobody() -> None:
    participants = Participants()
    assert participants.view == View(0, (), ())
    assert (participants.live, participants.incarnations) == ({}, {})
    assert participants.fence(Participant(0, 1), 0) == "worker:0 is not in view 0"
