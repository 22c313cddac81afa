"""Push and pull by what comes with PyTorch: RPC, and gloo's bare send and receive."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import rpc

from benchmarks.exchange.adam import FusedAdam
from benchmarks.exchange.contender import Exchange, answer, fork_client
from benchmarks.forked import fork
from benchmarks.processes import free_ports

_init_rpc: Any = rpc.init_rpc  # it has no annotations
_state: dict[str, FusedAdam] = {}
"""The state of a server of torch RPC. RPC calls functions, not methods, so the state is global."""


def rpc_exchange(
    name: str, nbytes: int, burst: float, *, servers: int, tcp: bool = False
) -> Exchange:
    """`torch.distributed.rpc` over TensorPipe: one call pushes the gradient, returns the values.

    Between processes of one host TensorPipe passes tensors through shared memory; with `tcp`,
    through sockets, as between hosts.
    """
    meet = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    share = nbytes // 4 // servers
    started = [
        fork(f"rpc:{index}", _rpc_server, meet, index, servers, share, tcp)
        for index in range(servers)
    ]
    return fork_client(name, burst, _rpc_client, meet, servers, share, tcp, servers=started)


def _rpc_options(meet: str, tcp: bool) -> rpc.TensorPipeRpcBackendOptions:
    only: dict[str, Any] = {"_transports": ["uv"], "_channels": ["basic"]} if tcp else {}
    return rpc.TensorPipeRpcBackendOptions(
        init_method=meet, num_worker_threads=2, rpc_timeout=120, **only
    )


def _rpc_server(
    pipe: Connection, meet: str, index: int, servers: int, numbers: int, tcp: bool
) -> None:
    torch.set_grad_enabled(False)
    _state["shard"] = FusedAdam(torch.zeros(numbers))
    options = _rpc_options(meet, tcp)
    _init_rpc(f"ps{index}", rank=index, world_size=servers + 1, rpc_backend_options=options)
    pipe.recv()  # for ever: it is killed


def push_pull(gradient: torch.Tensor) -> torch.Tensor:
    """In the server."""
    shard = _state["shard"]
    with torch.no_grad():
        shard.step(gradient)
    return shard.values


def _rpc_client(pipe: Connection, meet: str, servers: int, numbers: int, tcp: bool) -> None:
    options = _rpc_options(meet, tcp)
    _init_rpc("worker", rank=servers, world_size=servers + 1, rpc_backend_options=options)
    gradients = [torch.full((numbers,), 1e-3) for _ in range(servers)]
    values = [torch.zeros(numbers) for _ in range(servers)]

    def exchange() -> None:
        calls = [
            rpc.rpc_async(f"ps{index}", push_pull, args=(gradient,))
            for index, gradient in enumerate(gradients)
        ]
        for part, call in zip(values, calls, strict=True):
            part.copy_(call.wait())

    answer(pipe, exchange)


def gloo_exchange(name: str, nbytes: int, burst: float) -> Exchange:
    """`send` and `recv` of the gloo backend, both ways, and no optimizer: for information."""
    meet = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    server = fork("gloo:0", _gloo_server, meet, nbytes // 4)
    return fork_client(name, burst, _gloo_client, meet, nbytes // 4, servers=[server])


def _gloo_server(pipe: Connection, meet: str, numbers: int) -> None:
    dist.init_process_group("gloo", init_method=meet, rank=0, world_size=2)
    gradient, values = torch.zeros(numbers), torch.zeros(numbers)
    while True:
        dist.recv(gradient, 1)
        dist.send(values, 1)


def _gloo_client(pipe: Connection, meet: str, numbers: int) -> None:
    dist.init_process_group("gloo", init_method=meet, rank=1, world_size=2)
    gradient, values = torch.zeros(numbers), torch.zeros(numbers)

    def exchange() -> None:
        dist.send(gradient, 0)
        dist.recv(values, 0)

    answer(pipe, exchange)
