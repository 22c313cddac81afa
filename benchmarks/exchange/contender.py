"""A contender of push and pull: a client that exchanges so often when it is told to."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import final

from benchmarks.forked import Forked, fork
from benchmarks.pairs import Sample
from benchmarks.processes import cpu_seconds

_READY_SECONDS = 120.0
_BURST_SECONDS = 120.0
_MOST = 5000


class Exchange(ABC):
    """Something that makes a number of exchanges and says how many seconds they took.

    Args:
        name: in the results.
        burst: how many seconds one measurement should take; at least one exchange.
    """

    def __init__(self, name: str, burst: float) -> None:
        self.name = name
        self._burst = burst
        self._count = 0

    @property
    @abstractmethod
    def pids(self) -> Sequence[int]:
        """All processes that take part."""

    @abstractmethod
    def exchange(self, count: int) -> float:
        """Makes so many exchanges, one after the other; returns the seconds."""

    @abstractmethod
    def close(self) -> None:
        """Ends all processes."""

    @final
    def measure(self) -> Sample:
        """Returns the milliseconds of an exchange, the mean over a burst of them."""
        if not self._count:  # the first calls find out how many make a burst
            self.exchange(1)
            once = max(self.exchange(2) / 2, 1e-7)
            self._count = max(1, min(_MOST, round(self._burst / once)))
        before = cpu_seconds(self.pids)
        seconds = self.exchange(self._count)
        after = cpu_seconds(self.pids)
        return Sample(seconds / self._count * 1000, self._count, after - before)


@dataclass
class ForkedClient:
    """A client that was forked, and the servers beside it."""

    client: Forked
    servers: list[Forked] = field(default_factory=list)


class ForkedExchange(Exchange):
    """An exchange by forked processes: see `answer` for the client's side."""

    def __init__(self, name: str, burst: float, processes: ForkedClient) -> None:
        super().__init__(name, burst)
        self._processes = processes

    @property
    def pids(self) -> Sequence[int]:
        return [process.pid for process in (self._processes.client, *self._processes.servers)]

    @property
    def server_pids(self) -> Sequence[int]:
        """The servers alone."""
        return [process.pid for process in self._processes.servers]

    def exchange(self, count: int) -> float:
        self._processes.client.pipe.send(count)
        seconds = self._processes.client.receive(_BURST_SECONDS)
        assert isinstance(seconds, float)
        return seconds

    def close(self) -> None:
        for process in (self._processes.client, *self._processes.servers):
            process.kill()


def fork_client(
    name: str,
    burst: float,
    main: Callable[..., None],
    *arguments: object,
    servers: Sequence[Forked] = (),
) -> ForkedExchange:
    """Forks a client and waits until it is ready; if it fails, its servers end too.

    Raises:
        RuntimeError, TimeoutError: it did not get ready.
    """
    client = fork(name, main, *arguments)
    contender = ForkedExchange(name, burst, ForkedClient(client, list(servers)))
    try:
        client.receive(_READY_SECONDS)
    except BaseException:
        contender.close()
        raise
    return contender


def answer(pipe: Connection, exchange: Callable[[], None]) -> None:
    """In the client: says that it is ready, then exchanges as often as it is told."""
    pipe.send("ready")
    while True:
        count = pipe.recv()
        begin = time.perf_counter()
        for _ in range(count):
            exchange()
        pipe.send(time.perf_counter() - begin)
