"""Measures the latency and the bandwidth between the processes of a group, and what they cost.

A transfer needs the processor at both of its ends: for the calls, the system's copies, and the
threads of the transport that wake up. A task with one core does not compute meanwhile. This is
measured while both ends compute, as in a training step: a thread of the transport that finds its
connection locked by a thread that was preempted polls until that one runs again, and so takes two
to six times as much of the processor as where the processes only talk (docs/log.md).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from itertools import combinations

import torch
import torch.distributed as dist

from trireme.graph.execute.plan import BATCH, Message
from trireme.graph.execute.transfers import Route, TaskDevice, Transfers
from trireme.graph.place.costs import Link

_TAG = 1 << 20  # that of the messages, apart from those of others
_SMALL = 8  # bytes of a small message: they are the size of the next message
_FIRST, _LARGEST = 1 << 18, 1 << 22  # bytes of the smallest and the largest large message
_SMALL_TRIPS, _LARGE_TRIPS = 30, 20  # the most round trips
_FEWEST_EXCHANGES, _EXCHANGES = 4, 40  # messages of a size while both processes compute
_EXCHANGES_SHARE = 0.5  # of the time, about
_COMPUTING_SECONDS = 1e-3  # of both processes, before each exchange
_NOISE = 0.01
"""The smallest share of a large message's time that counts as time for its bytes. A smaller
difference between a large and a small message is noise."""
_ENOUGH_SECONDS = 0.01
"""A round trip that takes as long shows the bandwidth: larger messages are not tried."""


def measure_links(
    ranks: Sequence[int], group: dist.ProcessGroup | None = None, *, budget_seconds: float = 0.3
) -> Mapping[tuple[int, int], Link]:
    """Measures the links between processes, each pair by round trips of small and large messages.

    All processes call it together. Several pairs measure at the same time, each process in one of
    them: in as many rounds as it has others (the circle method of round-robin tournaments). A link
    is that of a pair of places in `ranks`, smaller place first, for both directions.
    """
    here = ranks.index(dist.get_rank())
    rounds = _rounds(len(ranks))
    table = torch.zeros(len(ranks), len(ranks), 4, dtype=torch.float64)
    for one, other in (pair for pairs in rounds for pair in pairs):
        if here == one:
            link = _Pair(ranks[other], group).measure(budget_seconds / len(rounds))
            table[one, other] = torch.tensor(astuple(link), dtype=torch.float64)
        elif here == other:
            _Pair(ranks[one], group).answer()
    dist.all_reduce(table, group=group)
    return {pair: Link(*table[pair].tolist()) for pair in combinations(range(len(ranks)), 2)}


def _rounds(count: int) -> list[list[tuple[int, int]]]:
    places = list(range(count + count % 2))  # with an odd number, one pauses in each round
    rounds = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in pairs if max(pair) < count])
        places = [places[0], places[-1], *places[1:-1]]
    return [pairs for pairs in rounds if pairs]


def _bandwidth(size: int, small_seconds: float, large_seconds: float) -> float:
    """Returns the bytes per second of a link, on which a message of more bytes takes longer.

    On a busy machine, all small messages may be later than a large one.
    """
    return size / max(large_seconds - small_seconds, _NOISE * large_seconds)


class _Pair:
    """This process and another one, which does what this one asks.

    Each message begins with the size of the next one, and the first one is small.
    """

    def __init__(self, other: int, group: dist.ProcessGroup | None) -> None:
        self._other = other
        self._group = group

    def measure(self, budget: float) -> Link:
        """Measures the link to the other process, in so many seconds."""
        until = time.perf_counter() + (1 - _EXCHANGES_SHARE) * budget
        self._trip(_SMALL, _SMALL)  # makes the connection
        trips = list[float]()
        while len(trips) < 3 or (
            len(trips) < _SMALL_TRIPS and time.perf_counter() < until - budget / 4
        ):
            trips.append(self._trip(_SMALL, _SMALL))
        # Processes are woken late now and then, which is part of the latency, but not of the
        # bandwidth. On a busy machine most are, and no measurement helps.
        least = min(trips)
        size, took, following = _SMALL, least, _FIRST
        while size == _SMALL or (
            size < _LARGEST and took < _ENOUGH_SECONDS and time.perf_counter() + 14 * took < until
        ):  # the next size takes four times as long at most, there and back
            self._trip(size, following)
            size, following = following, 4 * following
            took = self._trip(size, size)
        large = [took]
        while len(large) < _LARGE_TRIPS and time.perf_counter() + took < until:
            large.append(self._trip(size, size))
        self._trip(size, 0)
        count = int(_EXCHANGES_SHARE * budget / (2 * _COMPUTING_SECONDS + least + min(large)))
        count = min(max(count, _FEWEST_EXCHANGES), _EXCHANGES)
        self._send(torch.tensor([size, count]))
        work, more_work = self._exchanged(size, count)
        return Link(
            statistics.quantiles(trips, n=4)[0] / 2,
            _bandwidth(2 * (size - _SMALL), least, min(large)),
            work,
            max(more_work - work, 0.0) / (size - _SMALL),
        )

    def answer(self) -> None:
        """Returns each message, and makes the exchanges that the other process wants."""
        size = _SMALL
        while size:
            message = self._received(size)
            size = int(message[0])
            self._send(message)
        self._exchanged(*self._received(16).tolist())

    def _send(self, message: torch.Tensor) -> None:
        work = dist.isend(message, self._other, self._group, _TAG)
        assert work is not None, "the process is a member of the group"
        work.wait()

    def _received(self, size: int) -> torch.Tensor:
        message = torch.empty(size // 8, dtype=torch.int64)  # new memory, as for values of a step
        work = dist.irecv(message, self._other, self._group, _TAG)
        assert work is not None, "the process is a member of the group"
        work.wait()
        return message

    def _trip(self, size: int, following: int) -> float:
        message = torch.full((size // 8,), following)
        began = time.perf_counter()
        self._send(message)
        self._received(size)
        return time.perf_counter() - began

    def _exchanged(self, size: int, count: int) -> tuple[float, float]:
        """Exchanges messages, small and of a size, while both compute, as in a step.

        Returns:
            The seconds of the processor that a transfer takes at this end, small and large.
        """
        ranks = sorted((dist.get_rank(), self._other))
        places = [TaskDevice(rank, torch.device("cpu")) for rank in ranks]
        here, there = ranks.index(dist.get_rank()), ranks.index(self._other)

        def empty(message: Message) -> torch.Tensor:
            return torch.empty(int(message.name) // 8, dtype=torch.int64)

        spent = []
        for each in (_SMALL, size):
            mine = Message(str(each), here, there, BATCH, back=False)
            theirs = Message(str(each), there, here, BATCH, back=False)
            tags = {mine: _TAG + here, theirs: _TAG + there}
            route, value = Route(tags, dict.fromkeys(tags, 0)), empty(mine).zero_()
            work = list[float]()
            for _ in range(count):
                transfers = Transfers(ranks[here], places, route, empty, self._group)
                began = time.process_time()
                transfers.expect(theirs)
                computing = _compute()
                transfers.send(mine, value)
                transfers.take(theirs)
                transfers.release()
                work.append(time.process_time() - began - computing)
            # The system counts the time of the transport's threads late, but does not lose it.
            spent.append(statistics.fmean(work) / 2)
        return spent[0], spent[1]


def _compute() -> float:
    matrix = torch.ones(64, 64)
    began = time.thread_time()
    while (took := time.thread_time() - began) < _COMPUTING_SECONDS:
        matrix @ matrix
    return took
