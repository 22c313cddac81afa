"""Measures the latency and the bandwidth between the processes of a group, and what they cost.

A transfer needs the processor at both of its ends: for the calls, the system's copies, and the
threads of the transport that wake up. A task with one core does not compute meanwhile.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from itertools import combinations

import torch
import torch.distributed as dist

from trireme.graph.costs import Link

_SMALL_TRIPS = 30
"""How many round trips of a small message are made, at most; the median counts."""

_TOGETHER = 5
"""For how many round trips of a small message the processor's time is taken at once."""

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

_PYTHON_SECONDS = 6e-5
"""What the executor does for a transfer at each end, besides the calls that are measured here: it
makes the memory, the leaf of autograd, and its own notes. Measured on an EPYC of 2023."""

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

    Args:
        ranks: the global ranks of the processes of the group, in the same order everywhere.
        group: their process group; it must be able to send CPU tensors, as gloo's can.
        budget_seconds: how long all rounds may take, about, where links are not too slow for it.

    Returns:
        The link of each pair of places in `ranks`, smaller place first, the same in all processes.
        It holds for both directions.
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
    until = time.perf_counter() + budget
    _trip(other, group, _SMALL, _SMALL)  # makes the connection
    trips, works = list[float](), list[float]()
    while len(trips) < 3 or (
        len(trips) < _SMALL_TRIPS and time.perf_counter() < until - 0.6 * budget
    ):
        used = time.process_time()
        several = [_trip(other, group, _SMALL, _SMALL) for _ in range(_TOGETHER)]
        works.append((time.process_time() - used) / len(several))
        trips += several
    # The system counts the time of the transport's threads late, and too much at a time, where
    # several processes wait for a processor.
    work = min(works)
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
    large, works = [took], list[float]()
    message = torch.full((size // 8,), size)
    while not works or (len(large) < _LARGE_TRIPS and time.perf_counter() + took < until):
        used = time.process_time()
        large.append(_sent(other, group, message))
        works.append(time.process_time() - used)
    more_work = statistics.median(works) - work
    _trip(other, group, size, 0)
    return Link(
        statistics.quantiles(trips, n=4)[0] / 2,
        _bandwidth(2 * (size - _SMALL), least, min(large)),
        work / 2 + _PYTHON_SECONDS,
        max(more_work, 0.0) / (2 * (size - _SMALL)),
    )


def _bandwidth(size: int, small_seconds: float, large_seconds: float) -> float:
    """Returns the bytes per second of a link, on which a message of more bytes takes longer.

    On a busy machine, all small messages may be later than a large one.

    Args:
        size: how many bytes more there are, there and back.
        small_seconds: the round-trip time of a small message.
        large_seconds: the round-trip time of a large message, more than 0.
    """
    return size / max(large_seconds - small_seconds, _NOISE * large_seconds)


def _answer(other: int, group: dist.ProcessGroup | None) -> None:
    """Returns each message to a process that measures."""
    size = _SMALL
    while size:
        message = torch.empty(size // 8, dtype=torch.int64)
        _wait(dist.irecv(message, other, group, _TAG))
        size = int(message[0])
        _wait(dist.isend(message, other, group, _TAG))


def _trip(other: int, group: dist.ProcessGroup | None, size: int, following: int) -> float:
    """Returns how long a message takes there and back, of a size, with that of the next one."""
    return _sent(other, group, torch.full((size // 8,), following))


def _sent(other: int, group: dist.ProcessGroup | None, message: torch.Tensor) -> float:
    """Returns how long a message takes there and back."""
    began = time.perf_counter()
    _wait(dist.isend(message, other, group, _TAG))
    # New memory, as for the values of a step.
    answer = torch.empty_like(message)
    _wait(dist.irecv(answer, other, group, _TAG))
    return time.perf_counter() - began


def _wait(work: dist.Work | None) -> None:
    assert work is not None, "the process is a member of the group"
    work.wait()
