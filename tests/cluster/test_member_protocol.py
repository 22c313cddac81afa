from __future__ import annotations

import pytest

from trireme.cluster.member_protocol import MemberConfig, MemberProtocol
from trireme.cluster.messages import (
    Dismissed,
    Heartbeat,
    HeartbeatHeard,
    JobOver,
    JobOverHeard,
    Join,
    Joined,
    Leave,
    Left,
    RequestRefused,
    StatusQuery,
    ViewChanged,
)
from trireme.cluster.view import View
from trireme.errors import ClusterError, FrameError, PeerClosed, TaskClaimedError, WireTimeout

BROKEN = PeerClosed("it broke")
JOINED = Joined(3, 1.0, 4.0, rejoin_timeout=20.0)


def member(now: float = 100.0) -> tuple[MemberProtocol, MemberProtocol]:
    config = MemberConfig("tcp://c:1", "job", "worker", 1, b"", "", 10.0)
    protocol = MemberProtocol(config, now, "h", 7, start=11)
    return protocol, protocol


def joined() -> tuple[MemberProtocol, MemberProtocol]:
    protocol, state = member()
    assert protocol.connected(100.0) == Join("worker", 1, 0, "h", 7, "", start=11)
    assert protocol.heard(100.5, JOINED) is None
    return protocol, state


def test_heartbeats_follow_the_interval_that_the_coordinator_names() -> None:
    protocol, state = joined()
    assert (state.incarnation, protocol.away_since, protocol.due) == (3, None, 101.5)
    assert protocol.tick(101.0) == []
    assert protocol.tick(101.5) == [Heartbeat({})]
    assert protocol.due == 102.5


def test_a_silent_coordinator_is_given_up_when_it_has_answered_nothing_for_long() -> None:
    protocol, _ = joined()
    protocol.tick(101.5)
    for second in (102.5, 103.5, 104.5):
        protocol.tick(second)
    assert protocol.due == 105.5
    with pytest.raises(WireTimeout, match="tcp://c:1 sent nothing for 4 s"):
        protocol.tick(105.5)


def test_an_answer_of_any_kind_shows_that_the_coordinator_lives() -> None:
    protocol, _ = joined()
    protocol.tick(101.5)
    protocol.heard(105.0, HeartbeatHeard())
    assert protocol.tick(105.5) == [Heartbeat({})]


def test_asked_whether_it_hears_the_coordinator_it_answers_at_once() -> None:
    protocol, _ = joined()
    assert protocol.tick(101.5) == [Heartbeat({})]
    protocol.heard(101.6, HeartbeatHeard(7.0))
    assert protocol.tick(101.7) == []
    protocol.heard(101.8, HeartbeatHeard(7.2))  # to nothing
    assert protocol.tick(101.8) == [Heartbeat({}, 7.2)]


def test_it_joins_again_as_what_it_was() -> None:
    protocol, state = joined()
    assert protocol.broke(110.0, BROKEN) == 0.0
    assert protocol.broke(110.0, BROKEN) == 0.05
    assert protocol.connected(111.0).incarnation == 3
    protocol.heard(111.0, Joined(4, 1.0, 4.0))  # it had been given up
    assert (state.incarnation, protocol.connected(112.0).incarnation) == (4, 4)


def test_a_coordinator_that_stays_away_ends_the_job_for_this_task() -> None:
    protocol, state = joined()
    protocol.broke(110.0, BROKEN)
    assert protocol.broke(129.97, BROKEN) == pytest.approx(0.03)
    assert protocol.broke(130.0, BROKEN) is None
    assert state.over is not None and state.over.culprit == "coordinator:0"
    assert protocol.finished and not state.confirmed


def test_an_older_view_is_not_believed() -> None:
    protocol, state = joined()
    seen: list[object] = []
    state.subscribe(seen.append)
    for number in (2, 1, 2, 3):
        protocol.heard(101.0, ViewChanged(View(number, (), ())))
    assert state.view == View(3, (), ())
    assert seen == [View(2, (), ()), View(3, (), ())]


def test_who_is_dismissed_hears_so_once() -> None:
    protocol, state = joined()
    seen: list[object] = []
    state.subscribe(seen.append)
    for _ in range(2):
        assert protocol.heard(101.0, Dismissed("the job was made smaller")) is None
    assert seen == [state.dismissed] == [Dismissed("the job was made smaller")]
    assert not protocol.finished, "it leaves when it has finished its update"


def test_who_comes_without_a_place_is_told_why() -> None:
    protocol, state = member()
    protocol.connected(100.0)
    protocol.heard(100.1, RequestRefused("dismissed", "the job was made smaller"))
    assert isinstance(state.failure, ClusterError) and protocol.finished


def test_leaving_is_said_once_on_each_connection() -> None:
    protocol, state = joined()
    state.leaving = Leave("finished")
    assert protocol.tick(100.6) == [Leave("finished")] and protocol.tick(100.7) == []
    protocol.connected(101.0)
    protocol.heard(101.0, Joined(3, 1.0, 4.0))
    assert protocol.tick(101.0) == [Leave("finished")]
    protocol.heard(101.1, Left())
    assert protocol.finished and not protocol.served(101.1)  # it learns how the job ends


def test_the_end_is_confirmed_and_the_coordinator_closes() -> None:
    protocol, state = joined()
    over = JobOver("finished", "", "every worker has finished")
    assert protocol.heard(102.0, over) == JobOverHeard()
    assert state.over == over and state.confirmed
    assert protocol.tick(102.5) == [] and not protocol.served(102.5)
    assert protocol.served(protocol.due)


def test_who_is_refused_does_not_try_again() -> None:
    protocol, state = member()
    protocol.connected(100.0)
    protocol.heard(100.1, RequestRefused("claimed", "worker:1 is held by another"))
    assert isinstance(state.failure, TaskClaimedError)
    assert protocol.finished and protocol.served(100.1)


def test_what_is_no_message_to_a_member_is_refused() -> None:
    protocol, _ = joined()
    with pytest.raises(FrameError, match="StatusQuery"):
        protocol.heard(101.0, StatusQuery())
