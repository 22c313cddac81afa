from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.clocks import VirtualClock
from tests.cluster.harness import FAST, JOB, PATIENCE, SECRET, ByHand, Host, new_address
from trireme.cluster.coordinator import Coordinator
from trireme.cluster.member import Observer
from trireme.cluster.membership import ProcessEnded
from trireme.cluster.messages import (
    Heartbeat,
    HeartbeatHeard,
    JobOver,
    JobOverHeard,
    Join,
    Joined,
    Leave,
    Left,
    RequestRefused,
    Scale,
    Scaled,
    StatusQuery,
    ViewChanged,
    WaitingFor,
)
from trireme.cluster.state import State
from trireme.errors import AuthenticationError, ConfigurationError, ConnectionRefused, PeerClosed
from trireme.wire.connection import Incoming
from trireme.wire.handshake import Identity
from trireme.wire.message import Message


@pytest.fixture(params=["memory", "tcp"])
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    with Host(new_address(request.param)) as host:
        yield host


def test_a_task_joins_and_is_told_the_pace(host: Host) -> None:
    with ByHand(host.address, "worker:0") as peer:
        peer.say(Join("worker", 0, 0, "by-hand", 1, ""))
        assert peer.hear(Joined) == Joined(1, 0.05, 5.0, host.coordinator.state.epoch, 1)
        peer.say(Heartbeat({"step": 1}))
        peer.hear(HeartbeatHeard)


def test_those_who_wait_hear_for_whom_and_then_the_view(host: Host) -> None:
    with ByHand(host.address, "worker:0") as first, ByHand(host.address, "worker:1") as second:
        first.join("worker:0")
        assert first.hear(WaitingFor).names == ("worker:1",)
        second.join("worker:1")
        view = second.hear(ViewChanged).view
        assert first.hear(ViewChanged).view == view
        assert [worker.index for worker in view.workers] == [0, 1]


def test_a_connection_that_closes_is_noticed(host: Host) -> None:
    with ByHand(host.address, "worker:0") as first, ByHand(host.address, "worker:1") as second:
        first.join("worker:0")
        second.join("worker:1")
        assert first.hear(ViewChanged).view.number == 1
        second.connection.close()
        view = first.hear(ViewChanged).view
        assert view.number == 2 and [worker.index for worker in view.workers] == [0]


def test_a_peer_must_join_as_who_it_has_proven_to_be(host: Host) -> None:
    with ByHand(host.address, "worker:0") as peer:
        peer.say(Join("worker", 1, 0, "by-hand", 1, ""))
        with pytest.raises(PeerClosed):
            peer.hear(Joined)
    assert host.coordinator.state.tasks["worker:1"].incarnation == 0


def test_a_refused_peer_is_told_why(host: Host) -> None:
    with ByHand(host.address, "worker:7") as peer:
        peer.say(Join("worker", 7, 0, "by-hand", 1, ""))
        assert peer.hear(RequestRefused).code == "outside"


def test_the_coordinator_is_done_when_everybody_knows(host: Host) -> None:
    with ByHand(host.address, "worker:0") as first, ByHand(host.address, "worker:1") as second:
        first.join("worker:0")
        second.join("worker:1")
        first.say(Leave("failed", "boom"))
        first.hear(Left)
        over = second.hear(JobOver)
        assert over == first.hear(JobOver) == host.coordinator.state.over
        assert over.culprit == "worker:0"
        first.say(JobOverHeard())
        with pytest.raises(PeerClosed):
            first.hear(JobOver)
        assert not host.coordinator.done
        second.say(JobOverHeard())
        assert host.done.wait(PATIENCE) and host.coordinator.done


def test_the_status_needs_no_membership(host: Host) -> None:
    with ByHand(host.address, "worker:0") as first, ByHand(host.address, "worker:1") as second:
        first.join("worker:0")
        status = Observer(host.address, JOB, SECRET).query_status()
        assert (status.phase, status.missing) == ("forming", ("worker:1",))
        second.join("worker:1")
        assert Observer(host.address, JOB, SECRET).query_status().view == 1


def test_replies_carry_the_requests_sequence(host: Host) -> None:
    with ByHand(host.address, "observer:0") as peer:
        peer.say(StatusQuery(), sequence=41)
        assert peer.connection.receive(timeout=PATIENCE).sequence == 41


def test_who_knows_the_secret_may_scale_the_job_and_a_process_that_ended_is_lost() -> None:
    with (
        Host(new_address("tcp"), elastic=True) as host,
        ByHand(host.address, "worker:0") as first,
        ByHand(host.address, "worker:1") as second,
    ):
        first.join("worker:0")
        second.join("worker:1")
        observer = Observer(host.address, JOB, SECRET)
        assert observer.scale(workers=3) == Scaled(0, 3, ("worker:2",), ())
        with pytest.raises(ConfigurationError, match="without parameter servers"):
            observer.scale(servers=1)
        ended = ProcessEnded("worker:1", "by-hand", 1, "killed by SIGKILL")
        host.service.call_soon(lambda: host.coordinator.process_ended(ended))
        while len(first.hear(ViewChanged).view.workers) == 2:
            pass
        assert host.coordinator.state.tasks["worker:1"].state == "lost"


def test_a_task_may_not_scale_the_job(host: Host) -> None:
    with ByHand(host.address, "worker:0") as first, ByHand(host.address, "worker:1") as second:
        first.join("worker:0")
        second.join("worker:1")
        with ByHand(host.address, "worker:5") as third:
            third.say(Scale(workers=3))
            with pytest.raises(PeerClosed):
                third.hear(Joined)
        assert host.coordinator.state.tasks["worker:1"].state == "live"
        assert "worker:2" not in host.coordinator.state.tasks


def test_strangers_learn_nothing(host: Host) -> None:
    with pytest.raises(AuthenticationError):
        Observer(host.address, JOB, b"another secret").query_status()
    with pytest.raises(AuthenticationError):
        Observer(host.address, "job-2", SECRET).query_status()
    with pytest.raises(ConnectionRefused):
        Observer(new_address("tcp"), JOB, SECRET).query_status()


class FakeLink:
    """What a coordinator sees of a link."""

    def __init__(self, task: str) -> None:
        self.identity = Identity(JOB, task)
        self.said: list[Message] = []
        self.closed = False

    def offer(self, message: Message, *, sequence: int = 0) -> bool:
        self.said.append(message)
        return True

    def close(self) -> None:
        self.closed = True


class Alone:
    """A coordinator without a service, under a clock moved by hand."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.done = threading.Event()
        self.coordinator = Coordinator(FAST, clock=self.clock, on_done=self.done.set)

    def join(self, index: int) -> FakeLink:
        link = FakeLink(f"worker:{index}")
        self.coordinator.authenticated(link)  # type: ignore[arg-type]
        self.say(link, Join("worker", index, 0, "h", 1, ""))
        return link

    def say(self, link: FakeLink, message: Message) -> None:
        self.coordinator.received(link, Incoming(message, 0, (), 0))  # type: ignore[arg-type]

    def wait(self, seconds: float, ticks: int) -> None:
        for _ in range(ticks):
            self.clock.advance(seconds / ticks)
            self.coordinator.tick(self.clock.now())


def test_a_silent_task_is_cut_off() -> None:
    job = Alone()
    first, second = job.join(0), job.join(1)
    for _ in range(60):
        job.wait(0.1, ticks=1)
        job.say(first, Heartbeat({}))
    assert second.closed and not first.closed
    view = job.coordinator.state.view
    assert view is not None and [worker.index for worker in view.workers] == [0]
    job.coordinator.closed(second, None)  # type: ignore[arg-type]
    assert job.coordinator.state.tasks["worker:1"].state == "lost"


def test_a_coordinator_that_stood_still_gives_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    job = Alone()
    links = [job.join(0), job.join(1)]
    with caplog.at_level(logging.INFO, logger="trireme.cluster"):
        job.wait(3600.0, ticks=1)
    assert not any(link.closed for link in links)
    assert "was stalled" in caplog.text
    assert job.coordinator.state.phase == "running"


def test_that_holds_where_tasks_are_lost_within_a_moment() -> None:
    job = Alone()
    policy = dataclasses.replace(FAST, heartbeat_timeout=0.5)
    job.coordinator = Coordinator(policy, clock=job.clock)
    links = [job.join(0), job.join(1)]
    for _ in range(5):
        job.wait(0.6, ticks=1)
        assert not any(link.closed for link in links)
        for link in links:
            job.say(link, Heartbeat({}))
    job.wait(0.8, ticks=8)
    assert all(link.closed for link in links)


def test_a_coordinator_that_is_always_slow_still_finds_the_lost() -> None:
    job = Alone()
    links = [job.join(0), job.join(1)]
    job.wait(30.0, ticks=20)
    assert all(link.closed for link in links)


def test_a_task_may_be_lost_as_its_connection_closes_after_a_stall() -> None:
    """The stall is taken before the event that ends it, and decides about the same link."""
    job = Alone()
    first, second = job.join(0), job.join(1)
    for _ in range(9):
        job.wait(0.1 * FAST.heartbeat_timeout, ticks=1)
        job.say(first, Heartbeat({}))
    job.clock.advance(FAST.heartbeat_timeout)
    job.coordinator.closed(second, None)  # type: ignore[arg-type]
    assert job.coordinator.state.tasks["worker:1"].state == "lost"
    assert not first.closed


def test_each_decision_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    job = Alone()
    with caplog.at_level(logging.INFO, logger="trireme.cluster"):
        first, second = job.join(0), job.join(1)
        job.say(first, Heartbeat({}))
        job.say(second, Leave("failed", "boom"))
    # The job's end, too: who asked for the job is told in other words, by other ways.
    assert [record.levelno for record in caplog.records] == [logging.INFO] * 3
    assert "view 1" in caplog.messages[1] and "boom" in caplog.messages[2]


def test_done_is_said_once() -> None:
    job = Alone()
    calls: list[int] = []
    job.coordinator = Coordinator(FAST, clock=job.clock, on_done=lambda: calls.append(1))
    job.say(job.join(0), Leave("failed", "boom"))
    job.wait(4.0, ticks=40)
    assert not job.coordinator.done
    job.wait(2.0, ticks=20)
    assert job.coordinator.done and calls == [1]


class CountingJournal:
    """A journal that keeps the last state, and counts."""

    def __init__(self) -> None:
        self.state: State | None = None
        self.rows = 0

    def write(self, state: State) -> None:
        self.state = state
        self.rows += 1


def test_what_comes_together_is_written_once_and_makes_one_view() -> None:
    """Where a thousand workers leave at once, a view and a row for each of them took a minute."""
    job, journal, later = Alone(), CountingJournal(), list[Callable[[], object]]()
    policy = dataclasses.replace(FAST, workers=50, servers=0)
    job.coordinator = Coordinator(policy, clock=job.clock, journal=journal)  # type: ignore[arg-type]
    job.coordinator.later = later.append
    rows = journal.rows
    links = [job.join(index) for index in range(50)]
    assert len(later) == 1 and not links[0].said
    later.pop()()
    assert journal.rows == rows + 1
    for link in links:
        assert [type(message) for message in link.said] == [Joined, ViewChanged]
        link.said.clear()
    for link in links[:30]:
        job.say(link, Leave("finished", ""))
    job.say(links[40], Heartbeat({}))
    job.coordinator.closed(links[49], None)  # type: ignore[arg-type]
    later.pop()()
    assert journal.rows == rows + 2
    assert [type(message) for message in links[0].said] == [Left, ViewChanged]
    assert [type(message) for message in links[40].said] == [HeartbeatHeard, ViewChanged]
    assert links[0].said[1] is links[40].said[1], "so that it is encoded once"
    assert job.coordinator.state.tasks["worker:49"].state == "disconnected"
    assert job.coordinator.state is journal.state
    job.say(links[40], Heartbeat({}))
    assert not later and type(links[40].said[-1]) is HeartbeatHeard, "it waits for nothing"


def test_a_tick_decides_what_is_under_way() -> None:
    job = Alone()
    job.coordinator.later = lambda decide: None
    link = job.join(0)
    assert not link.said
    job.coordinator.tick(job.clock.now())
    assert type(link.said[0]) is Joined


def test_a_newline_in_what_a_task_says_begins_no_line_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = Alone()
    link = job.join(0)
    with caplog.at_level(logging.INFO, logger="trireme.cluster"):
        job.say(link, Leave("finished", "bye\nworker:1 has won"))
    assert not any(record.message.startswith("worker:1 has won") for record in caplog.records)
