"""Processes of one standing process group, which compute what a test sends to them."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.processes import free_ports
from tests.process_groups import SPAWNER

Work = Callable[..., Any]
"""(rank, *arguments) -> the result, which can be pickled: a function of a module."""

SECONDS = 30.0
"""How long a process of a group waits for another one: a deadlock shows after that."""

PATIENCE = 150.0
"""How much longer the test waits: a fresh program loads torch first, on busy cores for a minute."""


class StandingGroup:
    """The processes. They are started when they are first needed, and again after an error.

    Args:
        size: how many.
        seconds: the timeout of their process group.
        fresh: whether they are new programs, in the environment of now, and not forked.
    """

    def __init__(self, size: int, seconds: float = SECONDS, fresh: bool = False) -> None:
        self._size = size
        self._seconds = seconds
        self._spawner = multiprocessing.get_context("spawn") if fresh else SPAWNER
        self._connections: list[Connection] = []
        self.processes: list[BaseProcess] = []

    def __call__(self, work: Work, *arguments: Any) -> list[Any]:
        """Computes in every process; returns the results by rank.

        Raises:
            AssertionError: a process has raised an error, is gone, or is not ready in time.
        """
        if not self.processes:
            self._start()
        for connection in self._connections:
            connection.send((work, arguments))
        answers = [self._answer(rank) for rank in range(self._size)]
        wrong = [f"rank {i}:\n{answer}" for i, (good, answer) in enumerate(answers) if not good]
        if wrong:
            self.stop()
            raise AssertionError("\n".join(wrong))
        return [answer for _, answer in answers]

    def _answer(self, rank: int) -> tuple[bool, Any]:
        connection = self._connections[rank]
        if not connection.poll(self._seconds + PATIENCE):
            return False, "is not ready in time"
        try:
            answer: tuple[bool, Any] = connection.recv()
        except EOFError:
            return False, "is gone"
        return answer

    def _start(self) -> None:
        (port,) = free_ports(1)
        for rank in range(self._size):
            ours, its = self._spawner.Pipe()
            process = self._spawner.Process(
                target=_serve, args=(rank, self._size, port, its, self._seconds), daemon=True
            )
            process.start()
            its.close()
            self._connections.append(ours)
            self.processes.append(process)

    def stop(self) -> None:
        """Ends the processes."""
        for process in self.processes:
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        self.processes, self._connections = [], []


@contextmanager
def standing_group(
    size: int, seconds: float = SECONDS, fresh: bool = False
) -> Iterator[StandingGroup]:
    """A process group of this many new processes."""
    group = StandingGroup(size, seconds, fresh)
    try:
        yield group
    finally:
        group.stop()


def _serve(rank: int, size: int, port: int, connection: Connection, seconds: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds),
    )
    while True:
        try:
            work, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send((True, work(rank, *arguments)))
        except Exception:
            connection.send((False, traceback.format_exc()))
