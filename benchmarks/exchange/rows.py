"""Rows of a sparse table by Trireme, by one array, and by torch RPC: one pull and push of a batch.

A batch of keys, which may repeat, is deduplicated. Their rows are pulled, and a gradient for each
is pushed, which row-wise Adagrad applies. Batches are drawn outside the time that is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch.distributed import rpc

from benchmarks.cluster import Address, Transport, flat_vector, join, start_servers
from benchmarks.exchange.contender import ForkedExchange, fork_client
from benchmarks.forked import fork
from benchmarks.key_draws import BATCH, WIDTH, Batch, Draw, batches
from benchmarks.key_draws import gradients as drawn_gradients
from benchmarks.processes import free_ports
from benchmarks.table_rows import OPTIMIZER, SPEC, gather, update
from trireme.ps.rule import Rule
from trireme.tables.job.requests import RowKeys, RowRequest, RowUpdates
from trireme.tables.keys import unique

_init_rpc: Any = rpc.init_rpc  # it has no annotations
_state: dict[str, Any] = {}
"""The state of a server of torch RPC. RPC calls functions, not methods, so the state is global."""


def trireme_rows(
    name: str, burst: float, draw: Draw, rows: int, *, servers: int, transport: Transport
) -> ForkedExchange:
    """Starts a job of one worker, and fills its table."""
    address, started = start_servers(workers=1, servers=servers, shared=transport == "shm")
    return fork_client(name, burst, _client, address, draw, rows, transport, servers=started)


def _client(
    pipe: Connection, address: Address, draw: Draw, rows: int, transport: Transport
) -> None:
    model = flat_vector(16)
    optimizer = torch.optim.SGD(model.parameters())
    joined = join(address, 0, model, optimizer, Rule(), transport=transport, tables=[SPEC])
    client, gradients = joined.client, drawn_gradients()
    for first in range(0, rows, BATCH):
        keys = np.arange(first, min(rows, first + BATCH))
        client.push(1.0, extra=RowRequest([SPEC], [RowUpdates(0, keys, gradients[: keys.size])]))
        client.wait()

    def exchange(batch: Batch) -> None:
        keys, _ = unique(batch)
        client.pull_extra(RowRequest([SPEC], wanted=[RowKeys(0, keys)]))
        pushed = [RowUpdates(0, keys, gradients[: keys.size])]
        client.push(1.0, extra=RowRequest([SPEC], pushed), pull=False)
        client.wait()

    _answer(pipe, exchange, draw, rows)


def array_rows(name: str, burst: float, draw: Draw, rows: int, *, ahead: int) -> ForkedExchange:
    """Starts the limit: one process, one flat array, whose loops read so many rows `ahead`.

    The numbers of its rows are the keys.
    """
    return fork_client(name, burst, _array, draw, rows, ahead)


def _array(pipe: Connection, draw: Draw, rows: int, ahead: int) -> None:
    values, sums = np.ones((rows, WIDTH), np.float32), np.ones(rows, np.float32)
    out, gradients = np.empty((BATCH, WIDTH), np.float32), drawn_gradients()
    lr, eps = np.float32(OPTIMIZER.lr), np.float32(OPTIMIZER.eps)

    def exchange(batch: Batch) -> None:
        keys, _ = unique(batch)
        gather(values, sums, keys, out[: keys.size], ahead)
        update(values, sums, keys, gradients[: keys.size], lr, eps, ahead)

    _answer(pipe, exchange, draw, rows)


# torch RPC --------------------------------------------------------------------------------------


def rpc_rows(name: str, burst: float, draw: Draw, rows: int, *, servers: int) -> ForkedExchange:
    """Starts torch RPC: a sparse `nn.EmbeddingBag` at each server, updated by torch's Adagrad."""
    meet = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    started = [
        fork(f"rpc:{index}", _rpc_server, meet, index, servers, -(-rows // servers))
        for index in range(servers)
    ]
    return fork_client(name, burst, _rpc_client, meet, servers, draw, rows, servers=started)


def _rpc_server(pipe: Connection, meet: str, index: int, servers: int, rows: int) -> None:
    bag = torch.nn.EmbeddingBag(rows, WIDTH, mode="sum", sparse=True)
    _state["weight"] = bag.weight
    _state["optimizer"] = torch.optim.Adagrad(bag.parameters(), lr=OPTIMIZER.lr)
    _rpc_join(meet, f"ps{index}", index, servers)
    pipe.recv()  # for ever: it is killed


def _rpc_join(meet: str, name: str, rank: int, servers: int) -> None:
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=meet, num_worker_threads=2, rpc_timeout=120
    )
    _init_rpc(name, rank=rank, world_size=servers + 1, rpc_backend_options=options)


def pull(keys: torch.Tensor) -> torch.Tensor:
    """In the server: returns rows."""
    rows: torch.Tensor = _state["weight"].detach()[keys]
    return rows


def push(keys: torch.Tensor, gradients: torch.Tensor) -> None:
    """In the server: updates rows."""
    weight = _state["weight"]
    weight.grad = torch.sparse_coo_tensor(
        keys.unsqueeze(0), gradients, weight.shape, is_coalesced=True, check_invariants=False
    )
    _state["optimizer"].step()


def _rpc_client(pipe: Connection, meet: str, servers: int, draw: Draw, rows: int) -> None:
    _rpc_join(meet, "worker", servers, servers)
    gradients = torch.from_numpy(drawn_gradients())

    def exchange(batch: Batch) -> None:
        keys = torch.unique(torch.from_numpy(batch))
        places = [torch.nonzero(keys % servers == index)[:, 0] for index in range(servers)]
        parts = [keys[place] // servers for place in places]
        calls = [rpc.rpc_async(f"ps{i}", pull, args=(part,)) for i, part in enumerate(parts)]
        found = torch.empty(keys.numel(), WIDTH)
        for place, call in zip(places, calls, strict=True):
            found[place] = call.wait()
        calls = [
            rpc.rpc_async(f"ps{i}", push, args=(part, gradients[place]))
            for i, (part, place) in enumerate(zip(parts, places, strict=True))
        ]
        for call in calls:
            call.wait()

    _answer(pipe, exchange, draw, rows)


def _answer(pipe: Connection, exchange: Callable[[Batch], None], draw: Draw, rows: int) -> None:
    """In the client: says that it is ready, then exchanges batches as often as it is told."""
    drawn = batches(draw, rows)
    exchange(drawn())  # compiles, where something must be
    pipe.send("ready")
    while True:
        seconds = 0.0
        for _ in range(pipe.recv()):
            batch = drawn()
            began = time.perf_counter()
            exchange(batch)
            seconds += time.perf_counter() - began
        pipe.send(seconds)
