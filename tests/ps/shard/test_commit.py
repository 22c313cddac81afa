"""Asynchronous pushes over several servers: what server 0 decides, and what the others keep."""

from __future__ import annotations

import torch

from trireme.cluster.view import ShardEntry, View
from trireme.ps.flat import PartBuffer
from trireme.ps.layout import Layout
from trireme.ps.messages import ParameterSpec, Push
from trireme.ps.server_messages import PushesCommitted, PushesStaged
from trireme.ps.shard.commit import CommitFollower, CommitLeader
from trireme.ps.shard.instructions import Send
from trireme.ps.shard.participants import Participant
from trireme.ps.shard.push_table import Pending

LAYOUT = Layout.of([ParameterSpec("a", (16,), "float32", 0)], servers=1)
MOVED = View(3, (), (), (ShardEntry(0, 1, 4), ShardEntry(1, 2, 1), ShardEntry(2, 3, 0)))
"""The primaries of the three shards are not at the servers of their numbers."""


def pending(worker: int = 0, sequence: int = 1, incarnation: int = 1) -> Pending:
    gradients = PartBuffer(LAYOUT, 0, [torch.full((16,), 1.0)])
    return Pending(
        Participant(worker, incarnation), Push(1, sequence, 0, 5, 1.0), None, gradients, 0.0
    )


def decided(leader: CommitLeader) -> Pending | None:
    """Has server 0 decide and do the next push; returns it."""
    if leader.ready is None:
        return None
    leader.decide(applied=True)
    found = leader.decided
    leader.done()
    return None if found is None else found[0]


# Server 0 ----------------------------------------------------------------------------------------


def test_a_push_is_ready_once_every_server_has_it() -> None:
    leader, mine = CommitLeader(3), pending()
    leader.add(mine)
    assert leader.missing(mine, MOVED) == ("ps:1", "ps:0")
    leader.hear(1, PushesStaged(0, ((0, 1, 1),)))
    assert (leader.ready, leader.missing(mine, MOVED)) == (None, ("ps:0",))
    leader.hear(2, PushesStaged(0, ((0, 1, 1),)))
    assert decided(leader) is mine
    assert decided(leader) is None


def test_a_push_that_comes_last_to_server_0_is_ready_at_once() -> None:
    leader, mine = CommitLeader(2), pending()
    leader.hear(1, PushesStaged(0, ((0, 1, 1), (1, 1, 1))))
    leader.add(mine)
    assert leader.ready is mine


def test_what_another_server_said_before_does_not_count_for_a_later_push() -> None:
    leader = CommitLeader(2)
    leader.hear(1, PushesStaged(0, ((0, 1, 1),)))
    leader.add(pending(sequence=2))
    assert leader.ready is None
    leader.add(pending(worker=1, incarnation=2))
    leader.hear(1, PushesStaged(0, ((1, 1, 1),)))  # of the start before
    assert leader.ready is None


def test_what_was_said_late_takes_nothing_back() -> None:
    leader = CommitLeader(2)
    leader.hear(1, PushesStaged(3, ((0, 1, 2),)))
    leader.hear(1, PushesStaged(2, ((0, 1, 1),)))
    leader.add(pending(sequence=2))
    assert leader.ready is not None


def test_a_push_is_decided_once_however_often_others_say_that_they_have_it() -> None:
    leader, said = CommitLeader(2), PushesStaged(0, ((0, 1, 1),))
    leader.add(pending())
    leader.hear(1, said)
    leader.hear(1, said)
    assert decided(leader) is not None
    leader.hear(1, said)
    assert leader.ready is None
    assert leader.staged == []


def test_each_server_is_told_all_that_it_does_not_say_it_knows() -> None:
    leader = CommitLeader(3)
    for server in (1, 2):
        leader.hear(server, PushesStaged(0, ((0, 1, 1), (1, 1, 1))))
    leader.add(pending(0))
    leader.add(pending(1))
    decided(leader)
    first = PushesCommitted(0, ((0, 1, 1, True),), 4)
    assert leader.tell(4) == [Send(1, first), Send(2, first)]
    leader.hear(2, PushesStaged(1, ()))
    decided(leader)
    both = PushesCommitted(0, ((0, 1, 1, True), (1, 1, 1, True)), 4)
    assert leader.tell(4) == [Send(1, both), Send(2, PushesCommitted(1, both.pushes[1:], 4))]
    assert leader.tell(4) == []
    assert leader.tell(5) == [
        Send(1, PushesCommitted(0, both.pushes, 5)),
        Send(2, PushesCommitted(1, both.pushes[1:], 5)),
    ]


def test_a_server_that_has_staged_nothing_is_told_nothing() -> None:
    leader = CommitLeader(2)
    assert leader.tell(1) == []


def test_what_is_not_decided_is_dropped_with_its_worker() -> None:
    leader, waiting, ready = CommitLeader(2), pending(0), pending(1)
    leader.add(waiting)
    leader.hear(1, PushesStaged(0, ((1, 1, 1),)))
    leader.add(ready)
    for each in (waiting, ready):
        leader.drop(each, 2)
    leader.hear(1, PushesStaged(0, ((0, 1, 1), (1, 1, 1))))
    assert leader.ready is None
    assert leader.staged == []


# The others --------------------------------------------------------------------------------------


def test_a_server_says_what_it_has_and_how_much_it_knows() -> None:
    follower = CommitFollower()
    follower.add(pending(0))
    assert follower.tell(1) == [Send(0, PushesStaged(0, ((0, 1, 1),)))]
    assert follower.tell(1) == ()
    follower.hear(PushesCommitted(0, ((0, 1, 1, True),), 1))
    follower.done()
    follower.add(pending(1))
    assert follower.tell(1) == [Send(0, PushesStaged(1, ((1, 1, 1),)))]


def test_decisions_are_taken_once_and_in_order() -> None:
    follower, first, second = CommitFollower(), pending(0), pending(1)
    for each in (first, second):
        follower.add(each)
    follower.hear(PushesCommitted(0, ((1, 1, 1, True),), 1))
    follower.hear(PushesCommitted(0, ((1, 1, 1, True), (0, 1, 1, False)), 1))
    follower.hear(PushesCommitted(0, ((1, 1, 1, True),), 1))
    assert follower.decided == (second, True)
    follower.done()
    assert follower.decided == (first, False)
    follower.done()
    assert follower.decided is None
    assert follower.staged == []


def test_what_was_said_to_be_here_is_kept_in_memory_of_its_own() -> None:
    follower, mine = CommitFollower(), pending()
    follower.add(mine)
    follower.drop(mine, 2)
    mine.gradients.vectors[0].fill_(9.0)  # its worker, started anew, writes there again
    follower.hear(PushesCommitted(0, ((0, 1, 1, True),), 1))
    assert follower.decided is not None
    kept, _ = follower.decided
    assert kept.answered
    assert kept.gradients.vectors[0][0] == 1.0


def test_what_is_kept_goes_once_server_0_has_taken_the_view() -> None:
    follower, mine = CommitFollower(), pending()
    follower.add(mine)
    follower.drop(mine, 2)
    follower.hear(PushesCommitted(0, (), 1))
    assert len(follower.staged) == 1
    follower.hear(PushesCommitted(0, (), 2))
    assert follower.staged == []


def test_what_is_committed_stays_though_server_0_has_taken_the_view() -> None:
    follower, mine = CommitFollower(), pending()
    follower.add(mine)
    follower.hear(PushesCommitted(0, ((0, 1, 1, True),), 2))  # and a cut keeps it from being done
    follower.drop(mine, 2)
    assert follower.decided is not None
    follower.done()
    assert follower.staged == []


def test_what_server_0_will_never_commit_is_not_even_copied() -> None:
    follower, mine = CommitFollower(), pending()
    follower.hear(PushesCommitted(0, (), 2))
    follower.add(mine)
    follower.drop(mine, 2)
    assert follower.staged == []
