"""Workers, the aggregator of their host and a server, over real connections in threads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast
from unittest import mock

import pytest
import torch

from tests.ps.test_client import JOB, SECRET, SYNC, Servers, Worker, servers
from trireme.cluster.view import View, WorkerEntry
from trireme.errors import ConfigurationError, FrameError
from trireme.ps.aggregator import AggregatorHandler, connect_through
from trireme.ps.dense import PartBuffer
from trireme.ps.layout import Layout
from trireme.ps.messages import (
    Applied,
    Enlist,
    ParameterSpec,
    PushedTogether,
    Refused,
    Waiting,
)
from trireme.ps.rule import Rule
from trireme.wire.handshake import Identity
from trireme.wire.service import Link, Service
from trireme.wire.transport import listen


class Host:
    """One host's aggregator, in a thread."""

    def __init__(self, *, patience: float = 60.0) -> None:
        self.handler = AggregatorHandler(patience=patience)
        self.service = Service(listen("shm://"), [self.handler], job=JOB, secret=SECRET)
        self._upstream = connect_through(self.service, self.handler, JOB, SECRET)
        self.address = self.service.address
        self._thread = threading.Thread(target=self.service.run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._upstream.close()
        self.service.stop()
        self._thread.join(10)

    def ask(self, question: Callable[[], object]) -> object:
        """Returns what the service's thread answers."""
        answers: list[object] = []
        done = threading.Event()
        self.service.call_soon(lambda: (answers.append(question()), done.set()))
        assert done.wait(10)
        return answers[0]

    @property
    def bytes_up(self) -> tuple[int, int]:
        """How many bytes went to the server and came from there."""

        def count() -> tuple[int, int]:
            link = self.handler._server
            assert link is not None
            return link._connection.bytes_sent, link._connection.bytes_received

        return self.ask(count)  # type: ignore[return-value]

    def settle(self) -> None:
        """Waits until the server is connected to."""
        while not self.ask(lambda: self.handler.gathering.connected):
            pass


@contextmanager
def hosts(count: int, *, patience: float = 60.0) -> Iterator[list[Host]]:
    made = [Host(patience=patience) for _ in range(count)]
    try:
        yield made
    finally:
        for host in made:
            host.stop()


def join(
    made: Servers, host: Host | None, index: int, *, shared: bool = True, retry_seconds: float = 30
) -> Worker:
    address = None if host is None else host.address
    worker = Worker(
        made, index, SYNC, aggregator=address, shared=shared, retry_seconds=retry_seconds
    )
    worker.begin()
    if host is not None:
        host.settle()
    return worker


def settled(made: Servers) -> dict[str, int]:
    """The server's counters."""
    answers: queue.Queue[dict[str, int]] = queue.Queue()
    counters = made.handlers[0].shard.counters
    made.services[0].call_soon(lambda: answers.put(dict(counters)))
    return answers.get(timeout=10)


def step(workers: list[Worker], *gradients: float) -> list[object]:
    """One round: pushes of all, then the answers of all; returns the verdicts."""
    for worker, gradient in zip(workers, gradients, strict=True):
        worker.push(gradient)
    return [worker.client.wait().verdict for worker in workers]


@pytest.mark.parametrize("shared", [True, False], ids=["lent", "over the socket"])
def test_a_host_pushes_one_sum_for_all_its_workers(shared: bool) -> None:
    with servers(1, workers=4) as made, hosts(2) as (one, two):
        workers = [join(made, one if w < 3 else two, w, shared=shared) for w in range(4)]
        assert step(workers, 1.0, 2.0, 3.0, 6.0) == [Applied(1)] * 4
        assert step(workers, 0.0, 4.0, 0.0, 0.0) == [Applied(2)] * 4
        assert [worker.value for worker in workers] == [-4.0] * 4
        counters = settled(made)
        assert (counters["together"], counters["applied"], counters["rounds"]) == (4, 8, 2)
        assert "duplicate" not in counters and "apart" not in counters
        for worker in workers:
            worker.client.close()


def test_what_crosses_the_network_does_not_grow_with_the_workers_of_a_host() -> None:
    steps, per_step = 10, {}
    for count in (1, 2, 4):
        with servers(1, workers=count) as made, hosts(1) as (host,):
            workers = [join(made, host, w) for w in range(count)]
            step(workers, *[1.0] * count)
            before = host.bytes_up
            for _ in range(steps):
                step(workers, *[1.0] * count)
            after = host.bytes_up
            payload = workers[0].flat.layout.bytes
            per_step[count] = [
                (b - a) / steps - payload for a, b in zip(before, after, strict=True)
            ]
            assert settled(made)["together"] == steps + 1
            for worker in workers:
                worker.client.close()
    # Each way the gradients, or the values, go once. What is said of each worker is small.
    for one, other in ((1, 2), (2, 4)):
        for way in (0, 1):
            growth = per_step[other][way] - per_step[one][way]
            assert 0 < growth < 40 * (other - one), per_step


def test_a_worker_of_its_own_takes_part_beside_a_host() -> None:
    with servers(1, workers=3) as made, hosts(1) as (host,):
        workers = [join(made, host, 0), join(made, None, 1), join(made, host, 2)]
        assert step(workers, 1.0, 2.0, 6.0) == [Applied(1)] * 3
        assert {worker.value for worker in workers} == {-3.0}
        for worker in workers:
            worker.client.close()


def test_sums_give_the_same_bits_as_no_aggregator_and_two_hosts_nearly() -> None:
    values = []
    for split in ((None,) * 4, (0, 0, 0, 0), (0, 0, 1, 1)):
        with servers(1, workers=4) as made, hosts(2) as pair:
            workers = [
                join(made, None if which is None else pair[which], w)
                for w, which in enumerate(split)
            ]
            torch.manual_seed(3)
            for _ in range(5):
                for worker in workers:
                    for vector in worker.flat.gradients:
                        vector.normal_()
                    worker.client.push(1.0, hyper=worker.hyper())
                for worker in workers:
                    worker.client.wait()
            values.append(workers[3].flat.values[0].clone())
            for worker in workers:
                worker.client.close()
    assert torch.equal(values[0], values[1])
    torch.testing.assert_close(values[0], values[2], rtol=1e-6, atol=1e-6)


def test_workers_push_by_themselves_when_the_aggregator_dies_with_updates_in_hand() -> None:
    with servers(1, workers=3) as made, hosts(1) as (host,):
        workers = [join(made, host, w) for w in range(3)]
        step(workers, 1.0, 1.0, 1.0)
        workers[0].push(1.0)
        workers[1].push(2.0)
        host.stop()
        workers[2].push(6.0)
        assert {worker.client.wait().decided for worker in settle_all(workers)} == {Applied(2)}
        assert step(workers, 1.0, 1.0, 1.0) == [Applied(3)] * 3
        assert {worker.value for worker in workers} == {-5.0}
        assert settled(made)["applied"] == 9
        for worker in workers:
            worker.client.close()


def settle_all(workers: list[Worker]) -> list[Worker]:
    """Has all wait at a time: one that pushes by itself may be answered only with the others."""
    threads = [threading.Thread(target=worker.client.settle) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return workers


def test_a_sum_under_way_counts_once_when_the_aggregator_dies_before_its_answer() -> None:
    with servers(1, workers=3) as made, hosts(1) as (host,):
        workers = [join(made, host, 0), join(made, host, 1), join(made, None, 2)]
        workers[0].push(1.0)
        workers[1].push(2.0)
        while not settled(made).get("together"):
            pass  # the server holds the sum, and waits for worker 2
        host.stop()
        workers[2].push(6.0)
        settle_all(workers)
        assert {worker.client.wait().decided for worker in workers} == {Applied(1)}
        assert {worker.value for worker in workers} == {-3.0}
        assert settled(made)["applied"] == 3
        for worker in workers:
            worker.client.close()


def test_a_sum_under_way_counts_once_when_the_way_to_the_server_is_cut() -> None:
    with servers(1, workers=3) as made, hosts(1) as (host,):
        workers = [join(made, host, 0), join(made, host, 1), join(made, None, 2)]
        for number in range(1, 4):
            workers[0].push(1.0)
            workers[1].push(2.0)
            while settled(made).get("together", 0) < number:
                pass
            link = host.handler._server
            assert link is not None
            host.service.call_soon(link.close)
            workers[2].push(6.0)
            settle_all(workers)
            assert {worker.client.wait().decided for worker in workers} == {Applied(number)}
            host.settle()
        assert {worker.value for worker in workers} == {-9.0}
        assert settled(made)["applied"] == 9
        for worker in workers:
            worker.client.close()


def test_an_update_in_hand_counts_once_when_the_way_to_the_aggregator_is_cut() -> None:
    with servers(1, workers=3) as made, hosts(1) as (host,):
        workers = [join(made, host, w) for w in range(3)]
        workers[0].push(1.0)
        workers[1].push(2.0)
        host.ask(lambda: host.handler._links[1].close())
        workers[2].push(6.0)
        settle_all(workers)
        assert {worker.client.wait().decided for worker in workers} == {Applied(1)}
        assert {worker.value for worker in workers} == {-3.0}
        assert (settled(made)["applied"], settled(made)["together"]) == (3, 1)
        for worker in workers:
            worker.client.close()


@pytest.mark.parametrize("shared", [True, False], ids=["lent", "over the socket"])
def test_an_aggregator_that_hangs_is_left_and_what_it_does_later_counts_nothing(
    shared: bool,
) -> None:
    with servers(1, workers=2) as made, hosts(1) as (host,):
        workers = [
            join(made, host, w, shared=shared, retry_seconds=0.5 if w else 30.0) for w in range(2)
        ]
        go_on = threading.Event()
        host.service.call_soon(lambda: go_on.wait(20))
        workers[1].push(2.0)
        workers[0].client._host.close()  # type: ignore[union-attr]
        workers[0].push(1.0)
        settle_all(workers)
        assert {worker.client.wait().verdict for worker in workers} == {Applied(1)}
        for vector in workers[1].flat.gradients:
            vector.fill_(77.0)  # what the aggregator now reads for an update that is decided
        go_on.set()
        while not settled(made).get("apart"):
            pass
        assert [worker.value for worker in workers] == [-1.5, -1.5]
        assert settled(made)["applied"] == 2
        assert step(workers, 1.0, 2.0) == [Applied(2)] * 2
        assert [worker.value for worker in workers] == [-3.0, -3.0]
        for worker in workers:
            worker.client.close()


def test_the_rest_of_a_host_goes_on_when_one_of_it_dies_with_its_update_in_the_sum() -> None:
    with servers(1, workers=4) as made, hosts(1) as (host,):
        workers = [join(made, host, w) for w in range(3)] + [join(made, None, 3)]
        for worker, gradient in zip(workers[:3], (1.0, 2.0, 50.0), strict=True):
            worker.push(gradient)
        while not settled(made).get("together"):
            pass
        workers[2].client.close()
        second = View(2, made.first_view.servers, tuple(WorkerEntry(w, 1) for w in (0, 1, 3)))
        made.take(0, second)
        rest = [workers[0], workers[1], workers[3]]
        for worker in rest:
            worker.membership.view = second
        workers[3].push(6.0)
        settle_all(rest)
        assert {worker.client.wait().verdict for worker in rest} == {Applied(1)}
        assert step(rest, 1.0, 1.0, 1.0) == [Applied(2)] * 3
        assert {worker.value for worker in rest} == {-4.0}
        counters = settled(made)
        assert (counters["applied"], counters["together"]) == (6, 2)
        for worker in rest:
            worker.client.close()


def test_who_retires_is_not_waited_for() -> None:
    with servers(1, workers=3) as made, hosts(1) as (host,):
        workers = [join(made, host, w) for w in range(3)]
        workers[1].client.retire()
        rest = [workers[0], workers[2]]
        assert step(rest, 1.0, 3.0) == [Applied(1)] * 2
        assert settled(made)["together"] == 1
        for worker in workers:
            worker.client.close()


def test_one_that_is_late_is_waited_for_only_so_long() -> None:
    with servers(1, workers=3) as made, hosts(1, patience=0.2) as (host,):
        workers = [join(made, host, w) for w in range(3)]
        workers[0].push(1.0)
        workers[2].push(2.0)
        while not settled(made).get("together"):
            pass
        workers[1].push(6.0)
        assert [worker.client.wait().verdict for worker in workers] == [Applied(1)] * 3
        assert settled(made)["together"] == 2
        assert {worker.value for worker in workers} == {-3.0}
        for worker in workers:
            worker.client.close()


@pytest.mark.parametrize(
    ("rule", "count", "words"),
    [
        (Rule(), 1, "no rounds of every worker: use --strategy sync without --aggregate"),
        (Rule(aggregate=1, staleness=0), 1, "no rounds of every worker"),
        (SYNC, 2, "one parameter server, and this job has 2: several take no sums yet"),
        (Rule(0, 0, codec="fp16"), 1, "packs them by fp16: leave --compress out"),
    ],
    ids=["async", "backup", "two servers", "codec"],
)
def test_what_cannot_be_summed_is_refused_before_training(
    rule: Rule, count: int, words: str
) -> None:
    with servers(count) as made, hosts(1) as (host,), pytest.raises(ConfigurationError) as caught:
        Worker(made, 0, rule, aggregator=host.address)
    assert words in str(caught.value)


def test_an_aggregator_takes_values_only_with_the_answer_to_a_sum() -> None:
    handler = AggregatorHandler()
    handler._layout = layout = Layout.of([ParameterSpec("a", (16,), "float32", 0)], servers=1)
    nbytes = PartBuffer(layout, 0).nbytes
    link = cast(Link, None)
    for message in (Waiting("round 1", (), 0.0), Refused("apart", "", 1)):
        with pytest.raises(FrameError, match="has no payload of"):
            handler._place(link, message, nbytes)
    with pytest.raises(FrameError, match="has no payload of"):
        handler._place(link, PushedTogether(1, ()), nbytes + 4)
    with mock.patch.object(handler.gathering, "answered", return_value=[]) as answered:
        handler._heard(PushedTogether(1, ()), 1, ())
        views = handler._place(link, PushedTogether(1, ()), nbytes)
        handler._heard(PushedTogether(1, ()), 2, views)
        handler._heard(PushedTogether(1, ()), 3, ())
    assert [len(call.args[2]) for call in answered.call_args_list] == [0, 1, 0]


def test_an_aggregator_says_itself_what_it_cannot_sum() -> None:
    handler = AggregatorHandler()
    layout = Layout.of([ParameterSpec("a", (16,), "float32", 0)], servers=2)
    link = mock.Mock(identity=Identity(JOB, "worker:0", 1))
    answer = handler._enlist(link, Enlist(0, 1, layout.spec, SYNC, "tcp://h:1"))
    assert isinstance(answer, Refused)
    assert (answer.code, answer.view) == ("rejected", 0)
    assert "one parameter server, and this job has 2" in answer.reason
