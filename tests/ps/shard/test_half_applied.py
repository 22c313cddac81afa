"""Pushes on some servers only, where servers commit none: server 0 counts them."""

from __future__ import annotations

import pytest

from trireme.ps.server_messages import LastPushes
from trireme.ps.shard.commit import HalfApplied
from trireme.ps.shard.instructions import Send
from trireme.ps.shard.participants import Participant


def counted(*told: tuple[int, LastPushes], mine: int = 3, servers: int = 2) -> int:
    """Returns what server 0 counts when worker:1 is out since view 2 with its push `mine`."""
    counter = HalfApplied(0, servers)
    counter.left(Participant(1, 1), mine, 2)
    assert counter.taken(2) == ()
    for server, message in told:
        counter.hear(server, message)
    return counter.count


def last(server: int, sequence: int, view: int = 2, incarnation: int = 1) -> tuple[int, LastPushes]:
    return server, LastPushes(view, ((1, incarnation, sequence, 2),))


def test_a_push_on_some_servers_only_counts_once() -> None:
    assert counted(last(1, 4)) == counted(last(1, 2)) == 1
    assert counted(last(1, 3)) == 0
    assert counted(last(1, 3), last(2, 3), servers=3) == 0
    assert counted(last(1, 2), last(2, 2), servers=3) == 1
    assert counted(last(1, 4), last(1, 4)) == 1


def test_nothing_counts_before_every_server_has_taken_the_view() -> None:
    assert counted() == 0
    assert counted(last(1, 4), servers=3) == 0
    assert counted((1, LastPushes(1, ()))) == 0


def test_what_a_server_has_told_stays_as_it_was() -> None:
    assert counted(last(1, 3, view=3), last(1, 4, view=2)) == 0
    assert counted(last(1, 4), (1, LastPushes(3, ()))) == 1


def test_who_never_came_to_a_server_has_no_push_there() -> None:
    assert counted((1, LastPushes(2, ()))) == 1
    assert counted((1, LastPushes(2, ())), mine=0) == 0
    assert counted(last(1, 1, incarnation=2), last(1, 3)) == 1  # of a start that server 0 never saw


@pytest.mark.parametrize("server", [0, 2, -1])
def test_what_no_other_server_of_the_job_can_say_changes_nothing(server: int) -> None:
    assert counted(last(server, 4), last(1, 3)) == 0


def test_the_others_tell_server_0_all_that_they_know_with_each_view() -> None:
    counter = HalfApplied(2, 3)
    assert counter.taken(1) == [Send(0, LastPushes(1, ()))]
    counter.left(Participant(1, 1), 7, 2)
    assert counter.taken(2) == [Send(0, LastPushes(2, ((1, 1, 7, 2),)))]
    counter.left(Participant(1, 1), 7, 3)
    counter.left(Participant(0, 2), 0, 3)
    both = ((1, 1, 7, 2), (0, 2, 0, 3))
    assert counter.taken(3) == [Send(0, LastPushes(3, both))]
