"""The client's side of what goes wrong, over real connections to servers in threads."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn

from trireme.cluster.view import ServerEntry, View, WorkerEntry
from trireme.errors import WaitTimeout, WireTimeout
from trireme.ps.client import Client, ClientOptions
from trireme.ps.dense import FlatModel
from trireme.ps.messages import Applied, GroupSpec, Stale
from trireme.ps.optim import groups_of, spec_of
from trireme.ps.rule import Rule
from trireme.ps.server import LeaderLink, ShardHandler
from trireme.ps.server_links import Patience, ServerLinks
from trireme.ps.snapshot import ModelState
from trireme.wire.handshake import Identity
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

    def __init__(self, count: int, workers: int) -> None:
        listeners = [listen("tcp://127.0.0.1:0") for _ in range(count)]
        entries = tuple(ServerEntry(i, 1, each.address) for i, each in enumerate(listeners))
        self.first_view = View(1, entries, tuple(WorkerEntry(w, 1) for w in range(workers)))
        self.handlers = [ShardHandler(index) for index in range(count)]
        self.services = [
            Service(listener, [handler], job=JOB, secret=SECRET)
            for listener, handler in zip(listeners, self.handlers, strict=True)
        ]
        self.links: list[LeaderLink] = []
        self.running = False
        for index in range(count):
            self.take(index, self.first_view)
            if index:
                link = LeaderLink(self.services[index], Identity(JOB, f"ps:{index}"), SECRET)
                self.handlers[index].leader_gone = link.lost
                link.follow(entries[0])
                self.links.append(link)

    def take(self, server: int, view: View) -> None:
        """Gives one server a view; once it runs, waits until it has it."""
        taken = threading.Event()
        self.services[server].call_soon(partial(self.handlers[server].view, view))
        self.services[server].call_soon(taken.set)
        assert not self.running or taken.wait(10)


@contextmanager
def servers(count: int, workers: int = 1) -> Iterator[Servers]:
    made = Servers(count, workers)
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
        aggregator: str | None = None,
        shared: bool = False,
        retry_seconds: float = 30.0,
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
            retry_seconds=retry_seconds,
            patience_seconds=10.0,
            aggregator=aggregator,
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
        link = worker.client._links[1]
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
        assert second.client._level([1, 2]) == 2
        assert second.client.stopping
        for worker in (first, second):
            worker.client.close()


def test_a_lease_that_is_sent_again_gets_the_same_examples() -> None:
    with servers(1) as made:
        worker = Worker(made, 0, Rule())
        worker.begin()
        one = worker.client.lease("data", 100, 4, 1)
        worker.client._leases -= 1  # as if the answer had been lost
        assert worker.client.lease("data", 100, 4, 1) == one
        assert worker.client.lease("data", 100, 4, 1) != one
        worker.client.close()


def test_a_server_that_accepts_and_says_nothing_is_out_of_reach() -> None:
    with servers(1) as made, socket.create_server(("127.0.0.1", 0)) as silent:
        worker = Worker(made, 0, Rule(), retry_seconds=0.2)
        worker.begin()
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        worker.membership.view = View(1, (ServerEntry(0, 2, address),), made.first_view.workers)
        worker.client._links[0].close()
        worker.push()
        began = time.monotonic()
        with pytest.raises(WireTimeout, match="worker:0 could not reach ps:0 for 0 s"):
            worker.client.wait()
        assert time.monotonic() - began < 5, "it was waited for like an answer that is withheld"
        worker.client.close()


def test_who_is_waited_for_too_long_is_named() -> None:
    options = ClientOptions(JOB, SECRET, 3, 1, patience_seconds=10.0)
    links = ServerLinks(options, Membership(View(1, (), ())), 2, lambda *_: [])
    now = time.monotonic()
    links.check_patience(Patience(now), links.links)
    with pytest.raises(WaitTimeout, match="withheld until worker:1, worker:2 had pushed"):
        links.check_patience(Patience(now - 11, ["worker:1", "worker:2"]), links.links)
    with pytest.raises(WaitTimeout, match="worker:3 waited 10 s for an answer of ps:1, which said"):
        links.check_patience(Patience(now - 11), links.links[1:])
