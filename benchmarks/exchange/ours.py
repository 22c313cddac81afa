"""Push and pull by Trireme: the client that a session has, one worker, one or more servers."""

from __future__ import annotations

from multiprocessing.connection import Connection

import torch

from benchmarks.cluster import Address, Transport, flat_vector, join, start_servers
from benchmarks.exchange.contender import Exchange, answer, fork_client
from trireme.ps.rule import Rule


def trireme_exchange(
    name: str, nbytes: int, burst: float, *, servers: int, transport: Transport, replicas: int = 1
) -> Exchange:
    """Starts a job of one worker whose model is one vector of so many bytes."""
    address, started = start_servers(
        workers=1,
        servers=servers,
        shared=transport == "shm",
        tls=transport == "tls",
        replicas=replicas,
    )
    return fork_client(name, burst, _client, address, nbytes, transport, servers=started)


def _client(pipe: Connection, address: Address, nbytes: int, transport: Transport) -> None:
    model = flat_vector(nbytes // 4)
    optimizer = torch.optim.Adam(model.parameters())
    replica = join(address, 0, model, optimizer, Rule(), transport=transport)
    for gradient in replica.flat.gradients:
        gradient.fill_(1e-3)
    answer(pipe, replica.exchange)
