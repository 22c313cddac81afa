"""A worker's links to servers that say what the test has them say, over memory."""

from __future__ import annotations

import itertools
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from unittest import mock

import pytest

from trireme.cluster.view import ServerEntry, ShardEntry, View, WorkerEntry
from trireme.errors import (
    AuthenticationError,
    Fenced,
    JobFailed,
    ModelMismatchError,
    Rejected,
    TriremeError,
    UnsupportedOptimizerError,
    WaitTimeout,
    WireError,
)
from trireme.ps.client.lanes import ClientOptions, Lane, Request
from trireme.ps.client.server_links import ServerLink, ServerLinks, SharedBuffer
from trireme.ps.messages import (
    Applied,
    FencedVerdict,
    Pull,
    PushReply,
    Refused,
    RejectedVerdict,
    Stopping,
    Waiting,
)
from trireme.ps.replication.messages import PS_MESSAGES, ConnectToShard
from trireme.wire.connection import Incoming
from trireme.wire.message import Message
from trireme.wire.service import Link, Service
from trireme.wire.transport import listen

JOB, SECRET = "job", b"s" * 32
ME = WorkerEntry(3, 5)

Turn = Callable[[Link, Incoming], None]
"""What a server does with one request."""


def says(*messages: Message, late: int = 0) -> Turn:
    """Answers; `late` gives the answers an earlier request's number."""

    def turn(link: Link, incoming: Incoming) -> None:
        for message in messages:
            link.offer(message, sequence=incoming.sequence - late)

    return turn


def after(*turns: Turn) -> Turn:
    """One after the other, at one request."""

    def turn(link: Link, incoming: Incoming) -> None:
        for each in turns:
            each(link, incoming)

    return turn


def breaks(link: Link, incoming: Incoming) -> None:
    link.close()


def is_silent(link: Link, incoming: Incoming) -> None:
    pass


class Scripted:
    """A server that does what stands in its script, and answers with its own number after that."""

    messages = PS_MESSAGES

    def __init__(self, index: int) -> None:
        self.index = index
        self.script: deque[Turn] = deque()
        self.heard: list[tuple[int, Message]] = []
        self.tasks: list[tuple[str, int]] = []

    def authenticated(self, link: Link) -> None:
        self.tasks.append((link.identity.task, link.identity.incarnation))

    def received(self, link: Link, incoming: Incoming) -> None:
        if isinstance(incoming.message, ConnectToShard):
            return  # it says which shard is asked; each server here has one
        self.heard.append((incoming.sequence, incoming.message))
        turn = self.script.popleft() if self.script else says(Stopping(self.index))
        turn(link, incoming)

    def closed(self, link: Link, error: WireError | None) -> None:
        pass

    def tick(self, now: float) -> None:
        pass


class Membership:
    """The view and the failure that the test has set."""

    def __init__(self, view: View | None) -> None:
        self.view = view
        self.failure: JobFailed | None = None
        self.views: deque[View] = deque()
        self.checked = 0

    def check(self) -> None:
        self.checked += 1
        if self.views:
            self.view = self.views.popleft()
        if self.failure is not None:
            raise self.failure


class Rig:
    """Servers, and links to them."""

    def __init__(self, count: int) -> None:
        listeners = [listen("memory://") for _ in range(count)]
        self.entries = tuple(ServerEntry(i, 1, each.address) for i, each in enumerate(listeners))
        self.servers = [Scripted(index) for index in range(count)]
        self.services = [
            Service(each, [server], job=JOB, secret=SECRET)
            for each, server in zip(listeners, self.servers, strict=True)
        ]
        self.membership = Membership(View(1, self.entries, (ME,)))
        self.notices: list[tuple[str, tuple[str, ...], float]] = []
        self.links = self.made()

    def made(self, **changed: object) -> ServerLinks:
        options = {
            "retry_seconds": 5.0,
            "patience_seconds": 5.0,
            "waiting": lambda *notice: self.notices.append(notice),
            **changed,
        }
        made = ClientOptions(JOB, SECRET, ME.index, ME.incarnation, **options)  # type: ignore[arg-type]
        self.links = ServerLinks(made, self.membership, len(self.servers), lambda *_: [])
        return self.links

    def view(self, number: int, *workers: WorkerEntry) -> View:
        return View(number, self.entries, workers)

    def send(self, requests: Mapping[int, Request], *, again: bool = True) -> None:
        self.links.transmit(self.links.lanes.ask(time.monotonic(), requests, again=again))

    def ask(self, *, again: bool = True) -> Message:
        """Asks server 0 with the number of the view, and returns its answer."""
        self.send({0: Request(Pull(0))}, again=again)
        return self.links.finish()[0][0]

    def ask_all(self) -> list[Message]:
        self.start_all()
        return self.finish()

    def start_all(self) -> None:
        self.send({link.index: Request(Pull(0)) for link in self.links.links})

    def finish(self) -> list[Message]:
        answers = self.links.finish()
        return [answers[server][0] for server in sorted(answers)]

    @property
    def first(self) -> ServerLink:
        return self.links.links[0]

    @property
    def lanes(self) -> list[Lane]:
        return self.links.lanes.lanes


@contextmanager
def running(count: int) -> Iterator[Rig]:
    rig = Rig(count)
    threads = [threading.Thread(target=s.run, daemon=True) for s in rig.services]
    for thread in threads:
        thread.start()
    try:
        yield rig
    finally:
        rig.links.close()
        for service, thread in zip(rig.services, threads, strict=True):
            service.stop()
            thread.join(10)


@pytest.fixture
def one() -> Iterator[Rig]:
    with running(1) as rig:
        yield rig


@pytest.fixture
def two() -> Iterator[Rig]:
    with running(2) as rig:
        yield rig


@pytest.fixture(autouse=True)
def short_waits() -> Iterator[None]:
    with (
        mock.patch("trireme.ps.client.lanes.BACK_OFF", 0.001),
        mock.patch("trireme.ps.client.server_links.SLICE", 0.05),
    ):
        yield


# What is an answer, and to what -----------------------------------------------------------------


def test_requests_are_numbered_and_say_who_asks(one: Rig) -> None:
    one.servers[0].script += [says(Stopping(7)), says(Stopping(8))]
    assert [one.ask(), one.ask()] == [Stopping(7), Stopping(8)]
    assert one.servers[0].heard == [(1, Pull(1)), (2, Pull(1))]
    assert one.servers[0].tasks == [("worker:3", 5)]
    assert one.lanes[0].request is None
    assert one.first.connection is not None
    assert one.first.connection.peer == f"ps:0 at {one.entries[0].address}"
    one.links.close()
    assert one.first.connection is None


@pytest.mark.parametrize(
    "late",
    [
        Stopping(1),
        PushReply(Applied(1), 1, 0, True),
        PushReply(FencedVerdict(9, "x"), 1, 0, True),
        PushReply(RejectedVerdict("x"), 1, 0, True),
        Refused("fenced", "x", 9),
        Refused("rejected", "x", 9),
        Waiting("x", ("worker:9",), 1.0),
    ],
    ids=repr,
)
@pytest.mark.parametrize("ahead", [1, -1], ids=["of an earlier request", "of a later request"])
def test_an_answer_to_another_request_is_not_taken_for_this_ones(
    late: Message, ahead: int, one: Rig
) -> None:
    one.ask()
    one.servers[0].script.append(after(says(late, late=ahead), says(Stopping(2))))
    assert one.ask() == Stopping(2)
    assert [sequence for sequence, _ in one.servers[0].heard] == [1, 2]
    assert one.notices == []


def test_a_late_answer_from_one_server_is_not_taken_while_another_is_waited_for(two: Rig) -> None:
    two.ask_all()
    two.servers[0].script.append(after(says(Stopping(11), late=1), says(Stopping(22))))
    two.servers[1].script.append(after(says(Stopping(33), late=1), says(Stopping(44))))
    assert two.ask_all() == [Stopping(22), Stopping(44)]


def test_answers_are_in_the_order_of_the_links_however_they_come(two: Rig) -> None:
    asked = threading.Event()

    def waits(link: Link, incoming: Incoming) -> None:
        assert asked.wait(10)
        link.offer(Stopping(0), sequence=incoming.sequence)

    def lets_go(link: Link, incoming: Incoming) -> None:
        link.offer(Stopping(1), sequence=incoming.sequence)
        asked.set()

    two.servers[0].script.append(waits)
    two.servers[1].script.append(lets_go)
    assert two.ask_all() == [Stopping(0), Stopping(1)]


@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        (Refused("mismatch", "other layers", 1), ModelMismatchError, "^other layers$"),
        (Refused("optimizer", "no LBFGS", 1), UnsupportedOptimizerError, "^no LBFGS$"),
        (Refused("rejected", "no sense", 1), Rejected, "^no sense$"),
        (PushReply(RejectedVerdict("too far"), 0, 0, False), Rejected, "rejected a push: too far$"),
    ],
)
def test_a_refusal_is_the_error_that_it_means(
    answer: Message, kind: type[TriremeError], said: str, one: Rig
) -> None:
    one.servers[0].script.append(says(answer))
    with pytest.raises(kind, match=said):
        one.ask()
    assert one.ask() == Stopping(0), "the link goes on"


def test_busy_is_left_to_who_asked(one: Rig) -> None:
    one.servers[0].script.append(says(Refused("busy", "another cut", 1)))
    assert one.ask() == Refused("busy", "another cut", 1)
    assert one.lanes[0].request is None


# Other views ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fence", [Refused("fenced", "x", 2), PushReply(FencedVerdict(2, "x"), 0, 0, False)], ids=repr
)
def test_who_is_fenced_off_and_still_in_the_job_asks_again_under_the_new_view(
    fence: Message, one: Rig
) -> None:
    one.servers[0].script.append(says(fence))
    one.membership.views.append(one.view(2, ME))
    assert one.ask() == Stopping(0)
    assert one.servers[0].heard == [(1, Pull(1)), (2, Pull(2))]


def test_who_is_fenced_off_asks_again_after_a_moment(one: Rig) -> None:
    one.servers[0].script.append(says(Refused("fenced", "x", 2)))
    one.membership.views.append(one.view(2, ME))
    with mock.patch("trireme.ps.client.lanes.BACK_OFF", 0.2):
        began = time.monotonic()
        assert one.ask() == Stopping(0)
    assert time.monotonic() - began >= 0.2


def test_what_a_stopped_server_does_not_take_goes_to_the_one_that_has_its_place(two: Rig) -> None:
    goes_on = threading.Event()
    two.made(retry_seconds=30.0)
    two.servers[0].script.append(lambda *_: goes_on.wait(10) and None)
    two.send({0: Request(Pull(0))})  # it hangs over this
    shards = (ShardEntry(0, 1, 1), ShardEntry(1, 2, 1))
    two.membership.views.append(View(2, two.entries, (ME,), shards))
    try:
        two.send({0: Request(Pull(0), [bytes(32 << 20)])})
        assert two.finish() == [Stopping(1)]
    finally:
        goes_on.set()


def test_memory_moves_before_another_server_takes_the_place_of_one_that_was_stopped(
    two: Rig,
) -> None:
    two.ask_all()
    lent = mock.Mock(carry=lambda payload: 0, incoming_bytes=-1)
    connections = [link.connection for link in two.links.links]
    for connection in connections:
        assert connection is not None
        connection.lending = lent
    memory = mock.Mock(moves=True)
    memory.move.side_effect = lambda: closed.extend(
        link.connection is None for link in two.links.links
    )
    closed: list[bool] = []
    two.links.shared_buffers = [SharedBuffer(memory, (), ())] * 2
    goes_on = threading.Event()
    two.servers[0].script.append(lambda *_: goes_on.wait(10) and None)
    with mock.patch.object(two.links, "_lend"):
        two.start_all()
        shards = (ShardEntry(0, 1, 1), ShardEntry(1, 2, 1))
        two.membership.views.append(View(2, two.entries, (ME,), shards))
        try:
            assert two.finish() == [Stopping(1), Stopping(1)]
        finally:
            goes_on.set()
    assert closed == [True, True]  # of all that have the memory, and once
    two.ask_all()
    for link in two.links.links:
        assert link.connection is not None
        link.connection.lending = lent
    two.links.divide(2)  # what was asked is forgotten then, and may be answered yet
    assert memory.move.call_count == 2


def test_who_is_asked_once_is_told_of_the_fence(one: Rig) -> None:
    one.servers[0].script.append(says(Refused("fenced", "the view has changed", 2)))
    with pytest.raises(Fenced, match=r"^the view has changed$") as caught:
        one.ask(again=False)
    assert caught.value.view == 2
    assert len(one.servers[0].heard) == 1


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize(
    "fence",
    [Refused("fenced", "replaced", 2), PushReply(FencedVerdict(2, "replaced"), 0, 0, False)],
    ids=["refused", "verdict"],
)
@pytest.mark.parametrize("workers", [(), (WorkerEntry(3, 6),), (WorkerEntry(4, 5),)])
def test_who_is_not_in_the_view_of_the_fence_is_out(
    workers: tuple[WorkerEntry, ...], fence: Message, number: int, one: Rig
) -> None:
    one.servers[0].script.append(says(fence))
    one.membership.views.append(one.view(number, *workers))
    with pytest.raises(Fenced, match=r"worker:3 is no longer part of the job \(replaced\)") as told:
        one.ask()
    assert told.value.view == 2


def test_who_has_an_older_view_than_the_fence_waits_for_the_newer_one(one: Rig) -> None:
    """Its own view may be the one that is behind: whether it is out is not known before."""
    one.membership.view = one.view(1)
    one.servers[0].script += [says(Refused("fenced", "x", 2))] * 2
    one.membership.views += [one.view(1), one.view(2, ME)]
    assert one.ask() == Stopping(0)
    assert [sequence for sequence, _ in one.servers[0].heard] == [1, 2, 3]


def test_without_a_view_or_a_server_in_it_there_is_nobody_to_ask(one: Rig) -> None:
    one.membership.view = None
    with pytest.raises(WaitTimeout, match="worker:3 has no view of the cluster yet"):
        one.ask()
    one.membership.view = View(2, (ServerEntry(1, 1, "memory://x"),), (ME,))
    with pytest.raises(JobFailed, match="ps:0 is not part of the job any longer"):
        one.ask()


# Waiting ----------------------------------------------------------------------------------------


def test_a_notice_is_passed_on_and_is_no_answer(one: Rig) -> None:
    notice = Waiting("round 4", ("worker:1",), 7.5)
    one.servers[0].script.append(after(says(notice), says(Stopping(4))))
    before = one.membership.checked
    assert one.ask() == Stopping(4)
    assert one.notices == [("round 4", ("worker:1",), 7.5)]
    assert one.membership.checked > before, "whether the job goes on"
    one.links.lanes.options = ClientOptions(JOB, SECRET, ME.index, ME.incarnation)
    one.servers[0].script.append(after(says(notice), says(Stopping(4))))
    assert one.ask() == Stopping(4)


def test_a_notice_of_a_job_that_is_over_ends_the_wait(one: Rig) -> None:
    one.servers[0].script.append(says(Waiting("round 4", ("worker:1",), 7.5)))
    one.membership.failure = JobFailed("it is over")
    with pytest.raises(JobFailed, match="it is over"):
        one.ask()


@pytest.mark.parametrize("count", [1, 2])
def test_who_hears_nothing_looks_whether_the_job_is_over(count: int) -> None:
    with running(count) as rig:
        rig.servers[-1].script.append(is_silent)
        rig.membership.failure = JobFailed("it is over")
        with pytest.raises(JobFailed, match="it is over"):
            rig.ask_all()


@pytest.mark.parametrize("count", [1, 2])
def test_an_answer_that_is_withheld_too_long_names_for_whom(count: int) -> None:
    with running(count) as rig:
        rig.made(patience_seconds=2.0)  # within which the notice comes also on a busy machine
        rig.servers[-1].script.append(says(Waiting("round 4", ("worker:1", "worker:2"), 7.5)))
        with pytest.raises(WaitTimeout, match="withheld until worker:1, worker:2 had pushed"):
            rig.ask_all()


def test_a_server_that_says_nothing_is_named(two: Rig) -> None:
    two.made(patience_seconds=0.3)
    two.servers[1].script.append(is_silent)
    with pytest.raises(WaitTimeout, match=r"for an answer of ps:1 at memory://[^ ]*, which said"):
        two.ask_all()


@pytest.mark.parametrize("count", [1, 2])
def test_an_answer_that_is_there_counts_though_the_job_is_over(count: int) -> None:
    with running(count) as rig:
        rig.membership.failure = JobFailed("it is over")
        if count == 1:
            assert rig.ask_all() == [Stopping(0)]
            return
        rig.start_all()
        for link in rig.links.links:
            assert link.connection is not None
            poll = select.poll()  # of any descriptor, unlike select.select
            poll.register(link.connection, select.POLLIN)
            while not poll.poll(10_000):
                pass
        assert rig.finish() == [Stopping(0), Stopping(1)]


def test_several_links_are_looked_at_before_sleeping_where_all_lead_through_memory() -> None:
    options = ClientOptions(JOB, SECRET, 3, 5)
    links = ServerLinks(options, Membership(None), 2, lambda *_: [])
    lanes = links.lanes.lanes
    one, other = socket.socketpair()
    looks: list[bool] = []

    def wait(poll: Callable[[float], list[object]], seconds: float, *, look: bool) -> bool:
        looks.append(look)
        return bool(poll(0))

    with one, other, mock.patch.object(links, "_spin") as spin:
        spin.wait = wait
        for spins in ((spin, spin), (spin, None), (None, None)):
            for link, end, how in zip(links.links, (one, other), spins, strict=True):
                stream = mock.Mock(pending=False)
                link.connection = mock.Mock(spin=how, fileno=end.fileno, stream=stream)
            assert not links._readable(lanes)
        one.send(b"x")
        assert links._readable(lanes)
        assert looks == [True, False, False, False]
        links.links[1].connection.wait = lambda seconds: False
        assert not links._readable(lanes[1:]), "one alone waits by itself"
        assert len(looks) == 4
        links.links[0].connection = None
        assert links._readable(lanes), "the one that is there is looked at"
        assert looks[4:] == [False]
        other.recv(1)
        links.links[1].connection.stream.pending = True
        links.links[0].connection = links.links[1].connection
        assert links._readable(lanes), "what was decrypted shows on no descriptor"


# What breaks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2])
def test_what_broke_is_sent_again_with_the_same_number(count: int) -> None:
    with running(count) as rig:
        rig.servers[-1].script += [breaks, breaks]
        assert rig.ask_all() == [Stopping(index) for index in range(count)]
        assert rig.servers[-1].heard == [(1, Pull(1))] * 3
        assert rig.servers[-1].tasks == [("worker:3", 5)] * 3
        assert rig.lanes[-1].failing_since is None, "it answers again"


def test_what_broke_is_made_again_at_once_while_another_server_is_waited_for(two: Rig) -> None:
    asked_again = threading.Event()

    def waits(link: Link, incoming: Incoming) -> None:
        assert asked_again.wait(10)
        link.offer(Stopping(0), sequence=incoming.sequence)

    def lets_go(link: Link, incoming: Incoming) -> None:
        link.offer(Stopping(1), sequence=incoming.sequence)
        asked_again.set()

    two.servers[0].script.append(waits)
    two.servers[1].script += [breaks, lets_go]
    with mock.patch("trireme.ps.client.server_links.SLICE", 60.0):
        assert two.ask_all() == [Stopping(0), Stopping(1)]


def test_who_is_out_of_reach_too_long_is_named(one: Rig) -> None:
    one.made(retry_seconds=0.2)
    one.membership.view = View(1, (ServerEntry(0, 1, "memory://nobody"),), (ME,))
    began = time.monotonic()
    with pytest.raises(WireError, match="worker:3 could not reach ps:0 for 0 s: "):
        one.ask()
    assert 0.2 <= time.monotonic() - began < 5


@pytest.mark.parametrize(("changed", "seconds"), [({}, 30), ({"hurries": lambda: True}, 3)])
def test_who_is_asked_to_stop_gives_a_server_that_is_out_of_reach_up_sooner(
    one: Rig, changed: dict[str, Callable[[], bool]], seconds: int
) -> None:
    one.made(retry_seconds=30.0, patience_seconds=1800.0, **changed)
    one.membership.view = View(1, (ServerEntry(0, 1, "memory://nobody"),), (ME,))
    ticks = itertools.count(100.0, 0.25)
    clock = mock.Mock(monotonic=lambda: next(ticks))
    with mock.patch("trireme.ps.client.server_links.time", clock), pytest.raises(WireError) as lost:
        one.ask()
    assert f"could not reach ps:0 for {seconds} s: " in str(lost.value)


def test_a_server_that_answers_now_and_then_is_within_reach(one: Rig) -> None:
    """The time out of reach is counted from the last thing heard."""

    def slowly(link: Link, incoming: Incoming) -> None:
        link.offer(Waiting("x", (), 0.0), sequence=incoming.sequence)
        link.close()

    one.made(retry_seconds=0.2)
    ticks = itertools.count(100.0, 0.15)
    one.servers[0].script += [slowly] * 5
    clock = mock.Mock(monotonic=lambda: next(ticks))
    with mock.patch("trireme.ps.client.server_links.time", clock):
        assert one.ask() == Stopping(0)
    assert len(one.servers[0].heard) == 6


def test_a_job_that_is_over_is_not_connected_to_again(one: Rig) -> None:
    one.servers[0].script.append(breaks)
    one.membership.failure = JobFailed("it is over")
    with pytest.raises(JobFailed, match="it is over"):
        one.ask()
    assert len(one.servers[0].heard) == 1


def test_a_wrong_secret_is_said_at_once(one: Rig) -> None:
    one.links.lanes.options = ClientOptions(JOB, b"x" * 32, 3, 5)
    with pytest.raises(AuthenticationError):
        one.ask()
    assert one.servers[0].heard == []


def test_closing_forgets_the_connections_and_may_be_repeated(two: Rig) -> None:
    two.ask_all()
    two.links.close()
    two.links.close()
    assert [link.connection for link in two.links.links] == [None, None]
    assert two.ask_all() == [Stopping(0), Stopping(1)]
    assert [len(server.tasks) for server in two.servers] == [2, 2]
