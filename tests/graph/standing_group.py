"""Processes of one standing process group, which compute what a test sends to them."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.processes import free_ports

Work = Callable[..., Any]
"""(rank, *arguments) -> the result, which can be pickled: a function of a module."""

SECONDS = 60.0
"""How long one piece of work may take: a deadlock shows after that."""


class StandingGroup:
    """The processes.

    Args:
        connections: to each of them.
    """

    def __init__(self, connections: list[Connection]) -> None:
        self._connections = connections

    def __call__(self, work: Work, *arguments: Any) -> list[Any]:
        """Computes in every process; returns the results by rank.

        Raises:
            AssertionError: a process has raised an error, or is not ready in time.
        """
        for connection in self._connections:
            connection.send((work, arguments))
        results = []
        for rank, connection in enumerate(self._connections):
            assert connection.poll(SECONDS), f"rank {rank} is not ready after {SECONDS:.0f} s"
            good, result = connection.recv()
            assert good, f"rank {rank}:\n{result}"
            results.append(result)
        return results


@contextmanager
def standing_group(size: int) -> Iterator[StandingGroup]:
    """A process group of this many new processes."""
    context = multiprocessing.get_context("spawn")
    (port,) = free_ports(1)
    pairs = [context.Pipe() for _ in range(size)]
    processes = [
        context.Process(target=_serve, args=(rank, size, port, pairs[rank][1]), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    try:
        yield StandingGroup([ours for ours, _ in pairs])
    finally:
        for ours, _ in pairs:
            ours.close()
        for process in processes:
            process.join(5)
            process.kill()
            process.join()


def _serve(rank: int, size: int, port: int, connection: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=SECONDS),
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
