"""Round trips between the processes of a process group, which tell how far their clocks differ."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from trireme.clock import clock_name
from trireme.parallel.processes.lost_peers import lost_peer
from trireme.parallel.processes.process_group import TorchProcessGroup
from trireme.ps.results import ServerClock

ROUND_TRIPS = 9


def clock_trips(process_group: TorchProcessGroup) -> list[ServerClock]:
    """Returns round trips from this process to rank 0's clock; none in rank 0.

    A collective operation. Rank 0 answers one process after another: the first trip of a process
    also takes the time until it is its turn.
    """
    group, rank = process_group.control, process_group.rank
    clock = process_group.broadcast(clock_name().encode()).decode()
    question, answer = torch.zeros(1), torch.zeros(1, dtype=torch.float64)
    trips: list[ServerClock] = []
    with lost_peer():
        for other in range(1, process_group.size):
            for _ in range(ROUND_TRIPS):
                if rank == 0:
                    dist.recv(question, other, group=group)
                    answer[0] = time.monotonic()
                    dist.send(answer, other, group=group)
                elif rank == other:
                    asked = time.monotonic()
                    dist.send(question, 0, group=group)
                    dist.recv(answer, 0, group=group)
                    trips.append(ServerClock(float(answer), clock, asked, time.monotonic(), b""))
    return trips
