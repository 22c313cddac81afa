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

from trireme.graph.place.costs import Link

_TAG = 1 << 20  # that of the messages, apart from those of others
_SMALL, _LARGE = 16, 1 << 20  # bytes of the messages
_TRIPS, _EXCHANGES = 20, 12  # at most, of each size
_BUDGET_SECONDS = 0.3  # of all pairs of a process; a pair makes three trips of each size at least
_COMPUTING_SECONDS = 1e-3  # of both processes, before each exchange
_NOISE = 0.01
"""The smallest share of a large message's time that counts as time for its bytes. A smaller
difference between a large and a small message is noise."""


def measure_links(
    ranks: Sequence[int], group: dist.ProcessGroup | None = None
) -> Mapping[tuple[int, int], Link]:
    """Measures the links between processes, each pair by round trips of small and large messages.

    All processes call it together, and the pairs measure one after another. A link is that of a
    pair of places in `ranks`, smaller place first, for both directions.
    """
    here = ranks.index(dist.get_rank())
    pairs = list(combinations(range(len(ranks)), 2))
    table = torch.zeros(len(ranks), len(ranks), 4, dtype=torch.float64)
    for one, other in pairs:
        if here in (one, other):
            peer = _Peer(ranks[other if here == one else one], here == one, group)
            link = peer.measure(_BUDGET_SECONDS / len(pairs))
            if here == one:
                table[one, other] = torch.tensor(astuple(link), dtype=torch.float64)
        dist.barrier(group)
    dist.all_reduce(table, group=group)
    return {pair: Link(*table[pair].tolist()) for pair in pairs}


def bandwidth(size: int, small_seconds: float, large_seconds: float) -> float:
    """Returns the bytes per second of a link; a tiny difference of the two durations is noise."""
    return size / max(large_seconds - small_seconds, _NOISE * large_seconds)


class _Peer:
    """Another process, with which this one measures the link; the one that `leads` decides."""

    def __init__(self, rank: int, leads: bool, group: dist.ProcessGroup | None) -> None:
        self._rank = rank
        self._leads = leads
        self._group = group

    def measure(self, seconds: float) -> Link:
        """Measures the link, in about so many seconds."""
        trips = {size: self._trips(size, seconds / 4) for size in (_SMALL, _LARGE)}
        work = [self._work(size, seconds / 4) for size in (_SMALL, _LARGE)]
        least, size = min(trips[_SMALL]), _LARGE - _SMALL
        return Link(
            # Processes are woken late now and then, which is part of the latency, but not of the
            # bandwidth. On a busy machine most are, and no measurement helps.
            statistics.quantiles(trips[_SMALL], n=4)[0] / 2,
            bandwidth(2 * size, least, min(trips[_LARGE])),
            work[0],
            max(work[1] - work[0], 0.0) / size,
        )

    def _trips(self, size: int, seconds: float) -> list[float]:
        self._trip(size, last=False)  # makes the connection
        until, trips, last = time.perf_counter() + seconds, list[float](), False
        while not last:
            last = len(trips) >= 2 and (len(trips) == _TRIPS or time.perf_counter() > until)
            took, last = self._trip(size, last=last)
            trips.append(took)
        return trips

    def _trip(self, size: int, *, last: bool) -> tuple[float, bool]:
        """Makes a round trip; returns its duration, and whether the leader says that it is last."""
        message = torch.full((size // 8,), int(last))
        began = time.perf_counter()
        for sends in (self._leads, not self._leads):
            if sends:
                self._wait(dist.isend(message, self._rank, self._group, _TAG))
            else:  # into new memory, as the values of a step
                message = torch.empty_like(message)
                self._wait(dist.irecv(message, self._rank, self._group, _TAG))
        return time.perf_counter() - began, bool(message[0])

    def _work(self, size: int, seconds: float) -> float:
        """Returns the processor's seconds of a transfer, while both ends send and compute."""
        mine, work = torch.zeros(size // 8, dtype=torch.int64), list[float]()
        until, last = time.perf_counter() + seconds, False
        while not last:
            last = len(work) >= 3 and (len(work) == _EXCHANGES or time.perf_counter() > until)
            mine[0] = int(last)
            theirs = torch.empty_like(mine)
            began = time.process_time()
            receiving = dist.irecv(theirs, self._rank, self._group, _TAG)
            computing = _compute()
            sending = dist.isend(mine, self._rank, self._group, _TAG)
            self._wait(receiving)
            self._wait(sending)
            work.append(time.process_time() - began - computing)
            last = last if self._leads else bool(theirs[0])
        # The system counts the time of the transport's threads late, but does not lose it.
        return statistics.fmean(work) / 2

    @staticmethod
    def _wait(work: dist.Work | None) -> None:
        assert work is not None, "the process is a member of the group"
        work.wait()


def _compute() -> float:
    matrix = torch.ones(64, 64)
    began = time.thread_time()
    while (took := time.thread_time() - began) < _COMPUTING_SECONDS:
        matrix @ matrix
    return took
