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
from functools import partial
from itertools import combinations

import torch
import torch.distributed as dist

from trireme.graph.execute.plan import BATCH, Message
from trireme.graph.execute.transfers import Route, TaskDevice, Transfers
from trireme.graph.place.costs import Link

_SMALL_TRIPS = 30
"""How many round trips of a small message are made, at most; the median counts."""

_LARGE_TRIPS = 20
"""How many of the largest message are made, at most."""

_SMALL = 8
"""The bytes of a small message: they are the size of the next message."""

_TAG = 1 << 20
"""That of the messages, apart from those of others."""

_FIRST = 1 << 18
"""The bytes of the smallest large message."""

_LARGEST = 1 << 22
"""The bytes of the largest message."""

_EXCHANGES = 40
"""How many messages of a size are exchanged while both processes compute, at most."""

_FEWEST_EXCHANGES = 4

_EXCHANGES_SHARE = 0.5
"""The share of the time that the exchanges take, about."""

_COMPUTING_SECONDS = 1e-3
"""For how long both processes compute before each exchange."""

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
    them: in as many rounds as it has others (the circle method of round-robin tournaments).
    """
    here = ranks.index(dist.get_rank())
    rounds = _rounds(len(ranks))
    mine: dict[tuple[int, int], Link] = {}
    for pairs in rounds:
        for one, other in pairs:
            if here == one:
                seconds = budget_seconds / len(rounds)
                mine[one, other] = _measured(ranks[other], group, seconds)
            elif here == other:
                _answer(ranks[one], group)
    return _shared(mine, len(ranks), group)


def _shared(
    mine: Mapping[tuple[int, int], Link], count: int, group: dist.ProcessGroup | None
) -> dict[tuple[int, int], Link]:
    """Returns the links that all processes have measured, each of which one has measured."""
    table = torch.zeros(count, count, 4, dtype=torch.float64)
    for (one, other), link in mine.items():
        table[one, other] = torch.tensor(astuple(link), dtype=torch.float64)
    dist.all_reduce(table, group=group)
    return {pair: Link(*table[pair].tolist()) for pair in combinations(range(count), 2)}


def _rounds(count: int) -> list[list[tuple[int, int]]]:
    """Returns rounds of pairs of places, in which each pair is once, and no place twice a round."""
    places = list(range(count + count % 2))  # with an odd number, one pauses in each round
    rounds = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in pairs if max(pair) < count])
        places = [places[0], places[-1], *places[1:-1]]
    return [pairs for pairs in rounds if pairs]


def _measured(other: int, group: dist.ProcessGroup | None, budget: float) -> Link:
    """Measures the link to a process that answers.

    Each message begins with the size of the next one, and the first one is small.
    """
    until = time.perf_counter() + (1 - _EXCHANGES_SHARE) * budget
    _trip(other, group, _SMALL, _SMALL)  # makes the connection
    trips = list[float]()
    while len(trips) < 3 or (
        len(trips) < _SMALL_TRIPS and time.perf_counter() < until - budget / 4
    ):
        trips.append(_trip(other, group, _SMALL, _SMALL))
    # Processes are woken late now and then, which is part of the latency, but not of the bandwidth.
    # On a busy machine most are, and no measurement helps.
    least = min(trips)
    size, took, following = _SMALL, least, _FIRST
    while size == _SMALL or (
        size < _LARGEST and took < _ENOUGH_SECONDS and time.perf_counter() + 14 * took < until
    ):  # the next size takes four times as long at most, there and back
        _trip(other, group, size, following)
        size, following = following, 4 * following
        took = _trip(other, group, size, size)
    large = [took]
    while len(large) < _LARGE_TRIPS and time.perf_counter() + took < until:
        large.append(_trip(other, group, size, size))
    _trip(other, group, size, 0)
    count = int(_EXCHANGES_SHARE * budget / (2 * _COMPUTING_SECONDS + least + min(large)))
    count = min(max(count, _FEWEST_EXCHANGES), _EXCHANGES)
    _wait(dist.isend(torch.tensor([size, count]), other, group, _TAG))
    work, more_work = _exchanged(other, group, size, count)
    return Link(
        statistics.quantiles(trips, n=4)[0] / 2,
        _bandwidth(2 * (size - _SMALL), least, min(large)),
        work,
        max(more_work - work, 0.0) / (size - _SMALL),
    )


def _bandwidth(size: int, small_seconds: float, large_seconds: float) -> float:
    """Returns the bytes per second of a link, on which a message of more bytes takes longer.

    On a busy machine, all small messages may be later than a large one.
    """
    return size / max(large_seconds - small_seconds, _NOISE * large_seconds)


def _answer(other: int, group: dist.ProcessGroup | None) -> None:
    """Returns each message to a process that measures, and makes the exchanges that it wants."""
    size = _SMALL
    while size:
        message = torch.empty(size // 8, dtype=torch.int64)
        _wait(dist.irecv(message, other, group, _TAG))
        size = int(message[0])
        _wait(dist.isend(message, other, group, _TAG))
    wanted = torch.empty(2, dtype=torch.int64)
    _wait(dist.irecv(wanted, other, group, _TAG))
    _exchanged(other, group, *wanted.tolist())


def _trip(other: int, group: dist.ProcessGroup | None, size: int, following: int) -> float:
    """Returns how long a message takes there and back, of a size, with that of the next one."""
    message = torch.full((size // 8,), following)
    began = time.perf_counter()
    _wait(dist.isend(message, other, group, _TAG))
    # New memory, as for the values of a step.
    answer = torch.empty_like(message)
    _wait(dist.irecv(answer, other, group, _TAG))
    return time.perf_counter() - began


def _wait(work: dist.Work | None) -> None:
    assert work is not None, "the process is a member of the group"
    work.wait()


def _exchanged(
    other: int, group: dist.ProcessGroup | None, size: int, count: int
) -> tuple[float, float]:
    """Exchanges messages with a process that does the same, while both compute, as in a step."""
    here = dist.get_rank()
    places = [TaskDevice(rank, torch.device("cpu")) for rank in sorted((here, other))]
    ranks = [place.rank for place in places]
    mine, theirs = (
        Message("", ranks.index(one), ranks.index(two), BATCH, back=False)
        for one, two in ((here, other), (other, here))
    )
    tags = {mine: _TAG + mine.sender, theirs: _TAG + theirs.sender}
    route = Route(tags, dict.fromkeys(tags, 0))
    spent = []
    for each in (_SMALL, size):
        work = list[float]()
        for _ in range(count):
            value = torch.zeros(each // 8, dtype=torch.int64)
            transfers = Transfers(here, places, route, partial(_like, value), group)
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


def _like(value: torch.Tensor, message: Message) -> torch.Tensor:
    del message
    return torch.empty_like(value)


def _compute() -> float:
    """Computes for a while; returns the seconds of the processor that this thread took."""
    matrix = torch.ones(64, 64)
    began = time.thread_time()
    while (took := time.thread_time() - began) < _COMPUTING_SECONDS:
        matrix @ matrix
    return took
