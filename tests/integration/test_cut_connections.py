"""Connections that break at any byte: what was acknowledged is what was applied, once.

The gradients are whole numbers, each worker's in a place of its own, and SGD's learning rate is 1:
so the values themselves count the updates of every worker, exactly.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.faults import Proxies, Proxy
from tests.harness import Cluster, newer_view, run_job
from trireme.ps.client.client import Client
from trireme.ps.client.lanes import Lanes
from trireme.ps.messages import Applied, Stale
from trireme.session.session import Session
from trireme.session.worker.worker import Worker

WIDTH = 40
"""Elements a worker: several slots, so that every server has a part of each worker's."""


class Counter(nn.Module):
    """One row a worker. Its gradient is -1 in the row of the worker that computes it."""

    def __init__(self, workers: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(workers, WIDTH))

    def forward(self, worker: torch.Tensor) -> torch.Tensor:
        return -self.rows[worker[0]].sum()


@dataclass
class Counts:
    """What one worker knows of its updates, and what the servers know."""

    attempted: int
    applied: int
    stale: int
    rows: torch.Tensor
    tables: list[dict[int, tuple[int, int]]]


def session_for(cluster: Cluster, steps: int) -> Session:
    return Session(
        Counter(cluster.workers),
        lambda outputs, targets: outputs,
        lambda params: torch.optim.SGD(params, lr=1.0),
        max_steps=steps,
    )


def own_batches(session: Session) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    batch = torch.tensor([session.task.index])
    while not session.should_stop():
        yield batch, batch
    session.job.end()  # waits for everybody's last update, as the end of a loader does


def count(session: Session, batches: Iterator[Any] | None = None) -> Counts:
    attempted = applied = stale = 0
    for batch in batches or own_batches(session):
        attempted += 1
        verdict = session.step(batch).verdict
        applied += isinstance(verdict, Applied)
        stale += isinstance(verdict, Stale)
    worker = session.worker
    state = worker.backend.snapshot(state=False)
    tables = [
        {row.worker: (row.applied, row.stale) for row in status.workers}
        for status in worker.backend.status()
    ]
    return Counts(attempted, applied, stale, state.values["rows"], tables)


MODES = {
    "async": Cluster(2, 1, "async", scheme="tcp"),
    "async on two servers": Cluster(2, 2, "async", scheme="tcp"),
    "ssp": Cluster(2, 2, "ssp", staleness=2, scheme="tcp"),
    "sync": Cluster(2, 2, "sync", scheme="tcp"),
    "backup": Cluster(3, 2, "sync", aggregate=2, scheme="tcp"),
}


@pytest.mark.slow(one_in=2)
@pytest.mark.thorough
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("cluster", MODES.values(), ids=MODES)
def test_every_update_counts_once_however_often_connections_break(
    cluster: Cluster, seed: int
) -> None:
    steps = 60 if cluster.strategy != "sync" else 30
    with Proxies(seed, mean_lifetime=1500) as proxies:
        counts = run_job(cluster, lambda _: session_for(cluster, steps), count).values
        assert proxies.cuts > 20, f"only {proxies.cuts} connections were cut"
    each_counts_once(cluster, steps, counts)


def each_counts_once(cluster: Cluster, steps: int, counts: list[Counts]) -> None:
    # Each applied update moved its worker's row by 1, divided by the updates in its step.
    in_a_step = 1 if cluster.strategy != "sync" else cluster.aggregate or cluster.workers
    for worker, known in enumerate(counts):
        assert known.attempted == known.applied + known.stale
        assert torch.equal(counts[0].rows[worker], torch.full((WIDTH,), known.applied / in_a_step))
        for table in counts[0].tables:
            assert table[worker] == (known.applied, known.stale)
    assert sum(known.applied for known in counts) == steps * in_a_step
    assert (sum(known.stale for known in counts) > 0) == (cluster.aggregate is not None)


def test_a_cut_connection_to_the_coordinator_is_made_again() -> None:
    proxies: list[Proxy] = []

    def through(worker: int, address: str) -> str:
        proxies.append(Proxy(address))
        return proxies[-1].address

    cluster = Cluster(2, 1, "sync", scheme="tcp", coordinator_seen_at=through)

    def program(session: Session) -> tuple[int, int]:
        batch = torch.tensor([session.task.index])
        while not session.should_stop():
            if session.global_step == 5:
                proxies[session.task.index].cut()
            session.step((batch, batch))
        return session.recorder.applied, session.worker.backend.options.incarnation

    ran = run_job(cluster, lambda _: session_for(cluster, 40), program)
    assert ran.values == [(40, 1), (40, 1)]
    assert all(proxy.connections >= 2 for proxy in proxies)
    for proxy in proxies:
        proxy.close()


ONES = TensorDataset(torch.ones(4, dtype=torch.long), torch.ones(4, dtype=torch.long))
ASKED_FIRST: dict[str, Callable[[Session], object]] = {
    "to stop": lambda session: session.stop("enough"),
    "for a copy to evaluate": lambda session: session.evaluate(ONES),
}


@pytest.mark.parametrize("prefetch", [False, True], ids=["", "prefetch"])
@pytest.mark.parametrize("asked", ASKED_FIRST)
def test_whatever_a_worker_taken_for_lost_asks_first_brings_it_back(
    asked: str, prefetch: bool
) -> None:
    """It stood still for too long, and goes on with something else than an update."""
    evicted = threading.Event()
    proxies: dict[int, Proxy] = {}

    def through(worker: int, address: str) -> str:
        proxies[worker] = Proxy(address)
        return proxies[worker].address

    policy = {"heartbeat_interval": 0.1, "heartbeat_timeout": 1.0}
    cluster = Cluster(
        2, 1, "async", scheme="tcp", prefetch=prefetch, policy=policy, coordinator_seen_at=through
    )

    def lost(session: Session) -> tuple[Counts, int]:
        batch = torch.tensor([1])
        session.step((batch, batch))
        proxies[1].hold()
        assert evicted.wait(20)
        if prefetch:
            session.step((batch, batch))  # nobody has waited for the answer yet
        threading.Timer(0.3, proxies[1].flow).start()  # while it is asking
        ASKED_FIRST[asked](session)
        return count(session), session.worker.backend.options.incarnation

    def checker(session: Session) -> tuple[Counts, int]:
        worker = session.worker
        without = newer_view(worker, 1)
        assert [entry.index for entry in without.workers] == [0]
        worker.backend.pull(train=False)  # an answer under this view: the server has taken it too
        worker.remember()  # the values that came are the job's
        evicted.set()
        newer_view(worker, without.number)
        return count(session), worker.backend.options.incarnation

    (first, one), (second, two) = run_job(
        cluster,
        lambda _: session_for(cluster, 80),
        lambda session: checker(session) if session.is_chief else lost(session),
    ).values
    for proxy in proxies.values():
        proxy.close()
    assert (one, two) == (1, 2)
    applied = first.rows[:, 0].tolist()
    assert torch.equal(first.rows, second.rows)
    assert first.tables == [{index: (count, 0) for index, count in enumerate(applied)}]
    assert sum(applied) == 80 if asked != "to stop" else 0 < sum(applied) < 80


@pytest.mark.parametrize("first_word", ["a push", "a lease"])
def test_a_worker_taken_for_lost_comes_back_and_no_update_counts_twice(first_word: str) -> None:
    """The coordinator hears nothing of it for too long, while its servers do."""
    held, evicted, fenced = threading.Event(), threading.Event(), threading.Event()
    proxies: dict[int, Proxy] = {}

    def through(worker: int, address: str) -> str:
        proxies[worker] = Proxy(address)
        return proxies[worker].address

    policy = {"heartbeat_interval": 0.1, "heartbeat_timeout": 3.0}
    cluster = Cluster(2, 1, "async", scheme="tcp", policy=policy, coordinator_seen_at=through)

    def lost(session: Session) -> tuple[Counts, int]:
        batch = torch.tensor([1])
        session.step((batch, batch))
        proxies[1].hold()
        held.set()
        assert evicted.wait(20)
        ones = torch.ones(200, dtype=torch.long)
        dealt = session.loader(TensorDataset(ones, ones), 1) if first_word == "a lease" else None
        counts = count(session, dealt)  # the first word of this is fenced off until it is back
        return counts, session.worker.backend.options.incarnation

    def checker(session: Session) -> tuple[Counts, int]:
        worker = session.worker
        assert held.wait(20)
        without = newer_view(worker, 1)
        assert [entry.index for entry in without.workers] == [0]
        worker.backend.pull(train=False)  # an answer under this view: the server has taken it too
        worker.remember()  # the values that came are the job's
        evicted.set()
        assert fenced.wait(20)
        proxies[1].flow()
        again = newer_view(worker, without.number)
        assert [(entry.index, entry.incarnation) for entry in again.workers] == [(0, 1), (1, 2)]
        return count(session), worker.backend.options.incarnation

    check = Lanes._check_membership

    def checked(lanes: Lanes, number: int, reason: str) -> None:
        fenced.set()
        check(lanes, number, reason)

    with mock.patch.object(Lanes, "_check_membership", checked):
        (first, one), (second, two) = run_job(
            cluster,
            lambda _: session_for(cluster, 80),
            lambda session: checker(session) if session.is_chief else lost(session),
        ).values
    for proxy in proxies.values():
        proxy.close()
    assert (one, two) == (1, 2)
    assert first.attempted == first.applied
    # What was fenced off is counted as stale by the worker, and by nobody else.
    stale = int(first_word == "a push")
    assert (second.applied, second.stale) == (second.attempted - stale, stale)
    assert first.rows[:, 0].tolist() == [first.applied, 1 + second.applied]
    assert first.tables == [{0: (first.applied, 0), 1: (1 + second.applied, 0)}]
    assert first.applied + 1 + second.applied == 80


def test_a_worker_taken_for_lost_at_the_very_end_comes_back_and_holds_nobody_up() -> None:
    """It has retired, and waits for the others, who then wait for its new incarnation."""
    proxies: dict[int, Proxy] = {}
    waits = threading.Event()

    def through(worker: int, address: str) -> str:
        proxies[worker] = Proxy(address)
        return proxies[worker].address

    policy = {"heartbeat_interval": 0.1, "heartbeat_timeout": 3.0}
    cluster = Cluster(2, 1, "async", scheme="tcp", policy=policy, coordinator_seen_at=through)
    drain, retire = Client.drain, Worker.retire

    def drained(client: Client) -> int:
        if client.options.worker == 1:
            waits.set()
        return drain(client)

    def retired(worker: Worker) -> bool:
        if worker.lifecycle.is_chief:
            assert waits.wait(20) and worker.lifecycle.member is not None
            proxies[1].hold()
            without = newer_view(worker, 1)
            proxies[1].flow()
            again = newer_view(worker, without.number)
            assert [(entry.index, entry.incarnation) for entry in again.workers] == [(0, 1), (1, 2)]
        return retire(worker)

    with (
        mock.patch.object(Client, "drain", drained),
        mock.patch.object(Worker, "retire", retired),
        mock.patch("trireme.ps.shard.shard.NOTICE_SECONDS", 0.2),
    ):
        first, second = run_job(cluster, lambda _: session_for(cluster, 40), count).values
    for proxy in proxies.values():
        proxy.close()
    assert torch.equal(first.rows, second.rows)
    assert first.applied + second.applied == 40


def test_a_slow_network_changes_nothing_but_the_time() -> None:
    cluster = Cluster(2, 2, "sync", scheme="tcp")
    with Proxies() as proxies:

        def program(session: Session) -> Counts:
            for index, proxy in enumerate(proxies.by_server.values()):
                proxy.delay(0.001 * (1 + 4 * index))
            return count(session)

        counts = run_job(cluster, lambda _: session_for(cluster, 20), program).values
    assert [known.applied for known in counts] == [20, 20]
    assert torch.equal(counts[0].rows, torch.full((2, WIDTH), 10.0))
