"""The client's side of what goes wrong, over real connections to servers in threads."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.ps.peers import peer_links
from trireme.cluster.view import ServerEntry, ShardEntry, View, WorkerEntry
from trireme.errors import ConfigurationError, Fenced, FrameError, WaitTimeout, WireTimeout
from trireme.ps.client.client import Client
from trireme.ps.client.lanes import ClientOptions, Lanes, Request
from trireme.ps.client.operations import Ask, Operation, Pause, expect
from trireme.ps.flat import FlatModel, PartBuffer
from trireme.ps.messages import (
    Applied,
    Drain,
    GroupSpec,
    PullReply,
    Push,
    Span,
    Stale,
    Status,
    Stopping,
    Waiting,
)
from trireme.ps.optimizers import groups_of, spec_of
from trireme.ps.rule import Rule
from trireme.ps.server.handler import ShardHandler
from trireme.ps.server.peer_links import PeerLinks
from trireme.ps.shard.participants import Participant
from trireme.ps.shard.shard import Shard
from trireme.ps.snapshot import ModelState
from trireme.ps.snapshot_messages import Loaded
from trireme.wire.message import Message
from trireme.wire.service import Service
from trireme.wire.transport import listen

JOB, SECRET = "job", b"s" * 32
SYNC = Rule(aggregate=0, staleness=0)


class Membership:
    """Tells the view that the test has set."""

    def __init__(self, view: View) -> None:
        self.view = view

    def check(self) -> None:
        pass


class Servers:
    """Servers in threads, and what the coordinator would tell them."""

    def __init__(self, count: int, workers: int, shards: tuple[ShardEntry, ...] = ()) -> None:
        listeners = [listen("tcp://127.0.0.1:0") for _ in range(count)]
        entries = tuple(ServerEntry(i, 1, each.address) for i, each in enumerate(listeners))
        members = tuple(WorkerEntry(w, 1) for w in range(workers))
        self.first_view = View(1, entries, members, shards)
        self.handlers = [ShardHandler(index) for index in range(count)]
        self.services = [
            Service(listener, [handler], job=JOB, secret=SECRET)
            for listener, handler in zip(listeners, self.handlers, strict=True)
        ]
        self.links: list[PeerLinks] = []
        self.running = False
        for index in range(count):
            links = peer_links(self.handlers[index], self.services[index], JOB, SECRET)
            self.links.append(links)
            self.take(index, self.first_view)

    def take(self, server: int, view: View) -> None:
        """Gives one server a view; once it runs, waits until it has it."""
        taken = threading.Event()
        self.services[server].call_soon(partial(self.handlers[server].view, view))
        self.services[server].call_soon(taken.set)
        assert not self.running or taken.wait(10)


@contextmanager
def servers(count: int, workers: int = 1, shards: tuple[ShardEntry, ...] = ()) -> Iterator[Servers]:
    made = Servers(count, workers, shards)
    threads = [threading.Thread(target=s.run, daemon=True) for s in made.services]
    for thread in threads:
        thread.start()
    made.running = True
    try:
        yield made
    finally:
        for link in made.links:
            link.close()
        for service, thread in zip(made.services, threads, strict=True):
            service.stop()
            thread.join(10)


class Worker:
    """A client with a model of its own, whose gradients the test makes."""

    def __init__(
        self,
        made: Servers,
        index: int,
        rule: Rule,
        *,
        shared: bool = False,
        rejoin_seconds: float = 600.0,
        patience_seconds: float = 10.0,
    ) -> None:
        torch.manual_seed(1)
        model = nn.Linear(8, 8)
        self.membership = Membership(made.first_view)
        self.flat = FlatModel(
            [list(model.named_parameters())], servers=len(made.services), shared=shared
        )
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        options = ClientOptions(
            JOB,
            SECRET,
            index,
            1,
            retry_seconds=min(30.0, rejoin_seconds),
            rejoin_seconds=rejoin_seconds,
            patience_seconds=patience_seconds,
        )
        self.client = Client(options, self.membership, self.flat)
        self.client.attach(spec_of(self.optimizer), rule)

    def begin(self) -> None:
        """Loads zeros if nothing is there yet, and pulls."""
        zeros = {name: torch.zeros(p.shape) for name, p in self.flat.parameters.items()}
        self.client.load(ModelState(0, zeros))
        self.client.pull()

    def push(self, gradient: float = 1.0) -> None:
        for vector in self.flat.gradients:
            vector.fill_(gradient)
        self.client.push(1.0, hyper=self.hyper())

    def hyper(self) -> tuple[GroupSpec, ...]:
        return groups_of(self.optimizer, "SGD")

    @property
    def value(self) -> float:
        weight = next(iter(self.flat.parameters.values())).detach()
        assert (weight == weight[0, 0]).all(), weight
        return float(weight[0, 0])


@pytest.mark.parametrize("clip", [None, 1000.0], ids=["plain", "clipped"])
def test_a_fence_at_a_later_server_is_dealt_with_while_an_earlier_one_waits(
    clip: float | None,
) -> None:
    with servers(2) as made:
        worker = Worker(made, 0, Rule(aggregate=0, staleness=0, clip_norm=clip))
        worker.begin()
        second = View(2, made.first_view.servers, made.first_view.workers)
        made.take(1, second)
        worker.push()  # ps:1 fences it off, and ps:0 waits until ps:1 has it
        worker.membership.view = second
        assert worker.client.wait().verdict == Applied(1)
        assert worker.value == pytest.approx(-1.0)
        worker.client.close()


def test_a_connection_that_breaks_is_made_again_while_another_server_waits() -> None:
    with servers(2) as made:
        worker = Worker(made, 0, SYNC)
        worker.begin()
        link = worker.client._servers.links[1]
        assert link.connection is not None
        link.connection.close()
        worker.push()
        assert worker.client.wait().verdict == Applied(1)
        assert worker.value == -1.0
        worker.client.close()


def test_a_learning_rate_that_came_with_a_stale_update_is_sent_again() -> None:
    with servers(1, workers=2) as made:
        first, second = (Worker(made, index, Rule(1, staleness=0)) for index in (0, 1))
        for worker in (first, second):
            worker.begin()
        first.push()
        assert first.client.wait().verdict == Applied(1)
        second.optimizer.param_groups[0]["lr"] = 10.0
        second.push()
        assert second.client.wait().verdict == Stale(1)
        second.push()
        assert second.client.wait().verdict == Applied(2)
        assert second.value == -11.0
        for worker in (first, second):
            worker.client.close()


def test_a_worker_that_lags_behind_hears_that_the_job_has_ended() -> None:
    """Its stale answer came before the end; what brings it to the last step says so."""
    with servers(2, workers=2) as made:
        rule = Rule(1, staleness=0, max_steps=2)
        first, second = (Worker(made, index, rule) for index in (0, 1))
        for worker in (first, second):
            worker.begin()
        first.push()
        assert not first.client.wait().stop
        first.push()
        assert first.client.wait().stop
        protocol = second.client._protocol
        assert second.client._run(protocol.level([1, 2], train=False)) == 2
        assert not second.client.stopping, "it may be in the middle of a step, which it pushes"
        assert second.client._run(protocol.level([1, 2])) == 2
        assert second.client.stopping
        for worker in (first, second):
            worker.client.close()


def test_who_waits_for_a_step_that_does_not_come_is_told_for_whom() -> None:
    told: list[tuple[str, tuple[str, ...]]] = []
    with servers(1, workers=2) as made, mock.patch("trireme.ps.shard.shard.NOTICE_SECONDS", 0.1):
        worker = Worker(made, 0, SYNC, patience_seconds=1.5)
        worker.begin()
        waiting = lambda reason, names, seconds: told.append((reason, tuple(names)))  # noqa: E731
        worker.client._servers.lanes.options = replace(worker.client.options, waiting=waiting)
        with pytest.raises(WaitTimeout, match=r"until worker:0, worker:1 had pushed"):
            worker.client.pull(train=False, at_least=1)
        assert ("step 1", ("worker:0", "worker:1")) in told
        worker.client.close()


def test_a_lease_that_is_sent_again_gets_the_same_examples() -> None:
    with servers(1) as made:
        worker = Worker(made, 0, Rule())
        worker.begin()
        one = worker.client.lease("data", 100, 4, 1)
        worker.client._protocol._leases -= 1  # as if the answer had been lost
        assert worker.client.lease("data", 100, 4, 1) == one
        assert worker.client.lease("data", 100, 4, 1) != one
        worker.client.close()


def test_a_server_that_accepts_and_says_nothing_is_out_of_reach() -> None:
    with servers(1) as made, socket.create_server(("127.0.0.1", 0)) as silent:
        worker = Worker(made, 0, Rule(), rejoin_seconds=0.2)
        worker.begin()
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        worker.membership.view = View(1, (ServerEntry(0, 2, address),), made.first_view.workers)
        worker.client._servers.links[0].close()
        worker.push()
        began = time.monotonic()
        with pytest.raises(WireTimeout, match="worker:0 could not reach ps:0 for 0 s"):
            worker.client.wait()
        assert time.monotonic() - began < 5, "it was waited for like an answer that is withheld"
        worker.client.close()


def test_who_is_waited_for_too_long_is_named() -> None:
    entries = (ServerEntry(0, 1, "tcp://a"), ServerEntry(1, 1, "tcp://b"))
    view = View(1, entries, ())
    lanes = Lanes(ClientOptions("job", b"", 3, 1, patience_seconds=10.0), 2, lambda: view)
    ask = {server: Request(Status()) for server in range(2)}
    lanes.ask(0.0, ask)
    lanes.heard(1.0, 0, 1, Waiting("x", ("worker:1", "worker:2"), 1.0), ())
    assert lanes.tick(10.0) == []
    with pytest.raises(WaitTimeout, match="withheld until worker:1, worker:2 had pushed"):
        lanes.tick(11.0)
    lanes.ask(20.0, ask)
    lanes.wait(25.0)
    lanes.heard(26.0, 0, 2, Stopping(1), ())
    assert lanes.tick(35.0) == []
    with pytest.raises(
        WaitTimeout, match="worker:3 waited 10 s for an answer of ps:1 at tcp://b, which said"
    ):
        lanes.tick(36.0)


def test_the_end_of_the_others_is_waited_for_as_long_as_a_server_says_so() -> None:
    view = View(1, (ServerEntry(0, 1, "tcp://a"),), ())
    lanes = Lanes(ClientOptions("job", b"", 3, 1, patience_seconds=10.0), 1, lambda: view)
    lanes.ask(0.0, {0: Request(Drain())})
    for now in (9.0, 18.0, 27.0):
        lanes.heard(now, 0, 1, Waiting("the last updates", ("worker:1",), now), ())
        assert lanes.tick(now) == []
    with pytest.raises(WaitTimeout, match="withheld until worker:1 had pushed"):
        lanes.tick(38.0)


# What a push says, and what its answer does -----------------------------------------------------


@contextmanager
def overhearing() -> Iterator[dict[int, list[Push]]]:
    """What is pushed to each server."""
    heard: dict[int, list[Push]] = {}
    push = Shard.push

    def noted(
        shard: Shard, now: float, route: object, who: Participant, said: Push, gradients: PartBuffer
    ) -> Any:
        heard.setdefault(shard.number, []).append(said)
        return push(shard, now, route, who, said, gradients)

    with mock.patch.object(Shard, "push", noted):
        yield heard


def test_a_push_says_what_it_is_and_only_server_0_hears_of_examples() -> None:
    with servers(2) as made, overhearing() as heard:
        worker = Worker(made, 0, Rule(every=4))
        worker.begin()
        worker.push()
        worker.client.wait()
        spans = (Span("d", 0, 4), Span("d", 4, 8))
        worker.client.push(2.5, examples=list(spans), pulled=0, steps=3)
        result = worker.client.wait()
        assert (result.step, result.staleness, result.stop) == (4, 1, False)
        worker.client.push(1.0)
        assert worker.client.wait().staleness == 0
        for server, pushes in heard.items():
            first, second, third = pushes
            assert first == Push(1, 1, 0, 0, 1.0, worker.hyper())
            told = spans if server == 0 else ()
            assert second == Push(1, 2, 1, 0, 2.5, None, told, steps=3)
            assert third == Push(1, 3, 2, 4, 1.0)
        worker.client.close()


def test_hyper_parameters_are_said_when_they_have_changed_and_after_joining_again() -> None:
    with servers(1) as made, overhearing() as heard:
        worker = Worker(made, 0, Rule())
        worker.begin()

        def push() -> None:
            worker.push()
            worker.client.wait()

        push()
        push()
        worker.client.push(1.0)
        worker.client.wait()
        push()
        worker.optimizer.param_groups[0]["lr"] = 0.5
        push()
        worker.client.attach(spec_of(worker.optimizer), Rule())
        push()
        said = [p.hyper for p in heard[0]]
        assert said == [said[0], None, None, None, worker.hyper(), worker.hyper()]
        assert said[0] not in (None, worker.hyper())
        worker.client.close()


def test_bytes_are_counted_by_what_was_pushed_and_what_came() -> None:
    with servers(2) as made:
        worker = Worker(made, 0, SYNC)
        size = worker.flat.layout.bytes
        worker.begin()
        assert (worker.client.bytes_sent, worker.client.bytes_received) == (0, size)
        for count in (1, 2):
            worker.push()
            worker.client.wait()
            assert worker.client.bytes_sent == count * size
            assert worker.client.bytes_received == (1 + count) * size
        worker.client.close()


def test_an_operation_that_fails_has_ended_when_the_error_is_raised() -> None:
    ended = []

    def operation() -> Operation[None]:
        try:
            yield Ask({})
        finally:
            ended.append(True)

    with servers(1) as made:
        worker = Worker(made, 0, SYNC)
        lost = mock.patch.object(worker.client._servers, "finish", side_effect=WireTimeout("lost"))
        waits = operation()
        with lost, pytest.raises(WireTimeout, match="lost"):
            worker.client._run(waits)
        assert ended == [True]
        worker.client.close()


def test_one_push_at_a_time_and_none_after_the_end() -> None:
    with servers(1) as made:
        worker = Worker(made, 0, Rule(max_steps=2))
        worker.begin()
        worker.push()
        with pytest.raises(ConfigurationError, match="only one thread may make steps"):
            worker.push()
        assert not worker.client.wait().stop
        worker.push()
        result = worker.client.wait()
        assert (result.verdict, result.stop) == (Applied(2), True)
        with pytest.raises(ConfigurationError, match="worker:0 made an update after training had"):
            worker.push()
        worker.client.pull()
        assert worker.client.stopping
        worker.client.close()


def test_only_a_pull_to_train_may_stop_a_worker() -> None:
    with servers(1, workers=2) as made:
        first, second = (Worker(made, index, Rule(max_steps=1)) for index in (0, 1))
        first.begin()
        first.push()
        assert first.client.wait().stop
        second.client.pull(train=False)
        assert not second.client.stopping
        assert second.client.step == 1
        second.client.pull()
        assert second.client.stopping
        for worker in (first, second):
            worker.client.close()


def test_a_pull_to_train_that_is_fenced_off_is_not_asked_again() -> None:
    """Another may be chief by now: what to do is begun anew. Others go on under the new view."""
    with servers(1) as made:
        worker = Worker(made, 0, SYNC)
        worker.begin()
        second = View(2, made.first_view.servers, made.first_view.workers)
        made.take(0, second)
        with pytest.raises(Fenced, match="view 1 is not the present one, 2"):
            worker.client.pull()
        worker.membership.view = second
        worker.client.pull()
        made.take(0, View(3, made.first_view.servers, made.first_view.workers))

        def learn() -> None:
            worker.membership.view = View(3, made.first_view.servers, made.first_view.workers)

        with mock.patch.object(worker.membership, "check", learn):
            worker.client.pull(train=False)
        worker.client.close()


def test_what_is_asked_meanwhile_lets_the_push_under_way_be_answered_first() -> None:
    with servers(2) as made:
        worker = Worker(made, 0, SYNC)
        worker.begin()
        worker.push()
        assert [status.step for status in worker.client.status()] == [1, 1]
        result = worker.client.wait()
        assert result.verdict == Applied(1)
        assert worker.value == -1.0
        worker.client.close()


def test_values_of_different_steps_are_brought_to_the_same_one() -> None:
    """Server 1 is a step ahead, as when a round closed between two answers."""
    with servers(2, workers=2) as made:
        first, second = (Worker(made, index, Rule(1, staleness=0)) for index in (0, 1))
        for worker in (first, second):
            worker.begin()
        first.push()
        first.client.wait()
        size = second.client.bytes_received
        assert second.client._run(second.client._protocol.level([0, 1])) == 1
        assert second.client.bytes_received == size + second.client._values[0].nbytes
        second.flat.publish_values()
        half = [float(p.detach().flatten()[0]) for p in second.flat.parameters.values()]
        assert -1.0 in half, "what was behind is there"
        second.client._protocol._rule = Rule()
        levelled = second.client._run(second.client._protocol.level([3, 4]))
        assert levelled == 3, "asynchronous servers are where they are"
        for worker in (first, second):
            worker.client.close()


def test_a_new_incarnation_counts_anew() -> None:
    with servers(1) as made, overhearing() as heard:
        worker = Worker(made, 0, Rule())
        worker.begin()
        worker.push()
        worker.client.wait()
        worker.push()
        second = View(2, made.first_view.servers, (WorkerEntry(0, 2),))
        worker.membership.view = second
        made.take(0, second)
        worker.client.renew(2)
        assert worker.client.options.incarnation == 2
        worker.client.pull()
        worker.push()
        assert isinstance(worker.client.wait().verdict, Applied)
        last = heard[0][-1]
        assert (last.sequence, last.acknowledged) == (1, 0)
        (row,) = worker.client.status()[0].workers
        assert (row.incarnation, row.sequence) == (2, 1)
        worker.client.close()


# What else is asked -----------------------------------------------------------------------------


def test_workers_leave_each_other_bytes_and_hear_who_left_what() -> None:
    with servers(1, workers=2) as made:
        first, second = (Worker(made, index, Rule()) for index in (0, 1))
        first.client.share("topic", b"of the first")
        second.client.share("topic", b"second's")
        second.client.share("other", b"x")
        assert first.client.collect("topic") == {0: b"of the first", 1: b"second's"}
        assert first.client.collect("nothing") == {}
        for worker in (first, second):
            worker.client.close()


def test_an_end_is_asked_for_and_waited_for() -> None:
    with servers(1) as made:
        worker = Worker(made, 0, Rule())
        worker.begin()
        worker.push()
        worker.client.wait()
        assert worker.client.stop("enough") == 2, "the update that it may compute is let in"
        worker.client.retire()
        assert (worker.client.drain(), worker.client.step) == (1, 1)
        worker.client.close()


@pytest.mark.parametrize("rule", [SYNC, Rule()], ids=["sync", "async"])
def test_only_what_may_lack_others_updates_is_pulled_at_the_end(rule: Rule) -> None:
    with servers(1) as made:
        worker = Worker(made, 0, rule)
        worker.begin()
        worker.push()
        worker.client.wait()
        worker.client.retire()
        before = worker.client.bytes_received
        assert worker.client.drain() == 1
        pulled = worker.client.bytes_received - before
        assert pulled == (0 if rule is SYNC else before // 2)
        worker.client.close()


def test_a_copy_is_of_all_servers() -> None:
    with servers(2) as made:
        worker = Worker(made, 0, SYNC)
        worker.begin()
        worker.push()
        worker.client.wait()
        copy = worker.client.snapshot(state=True)
        assert copy.step == 1
        assert {name: float(v.flatten()[0]) for name, v in copy.values.items()} == {
            name: -1.0 for name in worker.flat.parameters
        }
        assert [row.applied for row in copy.workers] == [1]
        worker.client.close()


def test_a_copy_that_never_comes_about_is_given_up() -> None:
    with servers(1) as made:
        worker = Worker(made, 0, SYNC, patience_seconds=0.2)
        worker.begin()
        tried = mock.patch.object(worker.client._protocol, "_try_snapshot", _nothing)
        with tried, pytest.raises(WaitTimeout, match="could not copy a consistent state within"):
            worker.client.snapshot(state=False)
        worker.client.close()


def _nothing(state: bool) -> Operation[Any]:
    yield Pause(0.0)
    return None


@pytest.mark.parametrize("message", [Stopping(1), Waiting("x", (), 0.0)], ids=["other", "notice"])
def test_an_answer_to_something_else_is_named(message: Message) -> None:
    with pytest.raises(FrameError, match=r"answered with .* where Loaded was due"):
        expect((message, []), Loaded)


def test_values_of_another_length_are_refused() -> None:
    with servers(1) as made:
        worker = Worker(made, 0, SYNC)
        length = worker.client._values[0].nbytes
        reply = PullReply(1, False)
        assert worker.client._place(0, reply, length) == worker.client._values[0].views
        for wrong in (length - 1, length + 1, 0):
            with pytest.raises(FrameError, match=f"ps:0 sent {wrong} bytes of values where its"):
                worker.client._place(0, reply, wrong)
        (other,) = worker.client._place(0, Loaded(1), 12)
        assert len(other) == 12
        worker.client.close()
