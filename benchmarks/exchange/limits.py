"""Push and pull with nothing around it: bare sockets or memory, and the fused optimizer."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

import torch

from benchmarks.exchange.adam import FusedAdam
from benchmarks.exchange.contender import Exchange, answer, fork_client
from benchmarks.forked import fork

_BUFFER_BYTES = 4 << 20
_HEADER = struct.Struct("!QQ")


def socket_exchange(name: str, nbytes: int, burst: float, *, servers: int) -> Exchange:
    """Blocking TCP over loopback with large buffers: a header and the vector, each way."""
    share = nbytes // servers
    started = [fork(f"bare:{index}", _serve, share) for index in range(servers)]
    ports = [process.receive(60) for process in started]
    return fork_client(name, burst, _client, ports, share, servers=started)


def _serve(pipe: Connection, nbytes: int) -> None:
    torch.set_grad_enabled(False)
    with _socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        pipe.send(listening.getsockname()[1])
        connected, _ = listening.accept()
    values, gradient = torch.zeros(nbytes // 4), torch.zeros(nbytes // 4)
    adam = FusedAdam(values)
    header, received, sent = bytearray(_HEADER.size), _bytes(gradient), _bytes(values)
    while _fill(connected, memoryview(header)) and _fill(connected, received):
        adam.step(gradient)
        _send(connected, [_HEADER.pack(1, nbytes), sent])


def _client(pipe: Connection, ports: Sequence[int], nbytes: int) -> None:
    connections = []
    for port in ports:
        connection = _socket()
        connection.connect(("127.0.0.1", port))
        connections.append(connection)
    values = [memoryview(bytearray(nbytes)) for _ in ports]
    gradients = [memoryview(bytearray(nbytes)) for _ in ports]
    header = memoryview(bytearray(_HEADER.size))

    def exchange() -> None:
        for connection, gradient in zip(connections, gradients, strict=True):
            _send(connection, [_HEADER.pack(1, nbytes), gradient])
        for connection, part in zip(connections, values, strict=True):
            _fill(connection, header)
            _fill(connection, part)

    answer(pipe, exchange)


def _socket() -> socket.socket:
    bare = socket.socket()
    bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted sockets inherit them
    bare.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    bare.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    return bare


def _bytes(tensor: torch.Tensor) -> memoryview:
    view: memoryview = tensor.view(torch.uint8).numpy().data
    return view


def _fill(connected: socket.socket, view: memoryview) -> bool:
    done = 0
    while done < len(view):
        count = connected.recv_into(view[done:])
        if not count:
            return False
        done += count
    return True


def _send(connected: socket.socket, parts: Sequence[bytes | memoryview]) -> None:
    header, payload = parts
    sent = connected.sendmsg(parts) - len(header)
    while sent < len(payload):
        sent += connected.send(payload[sent:])


def memory_exchange(name: str, nbytes: int, burst: float, *, servers: int) -> Exchange:
    """One process: copies the gradient in, steps, copies the values out.

    With several servers each part has a thread of its own, as each server would have a core.
    """
    return fork_client(name, burst, _in_memory, nbytes, servers)


class _Part:
    def __init__(self, numbers: int) -> None:
        self._gradient, self._staged = torch.full((numbers,), 1e-3), torch.zeros(numbers)
        self._values, self._pulled = torch.zeros(numbers), torch.zeros(numbers)
        self._adam = FusedAdam(self._values)

    def exchange(self) -> None:
        torch.set_grad_enabled(False)
        self._staged.copy_(self._gradient)
        self._adam.step(self._staged)
        self._pulled.copy_(self._values)


def _in_memory(pipe: Connection, nbytes: int, servers: int) -> None:
    parts = [_Part(nbytes // 4 // servers) for _ in range(servers)]
    if servers == 1:
        answer(pipe, parts[0].exchange)
        return
    with ThreadPoolExecutor(servers) as pool:
        answer(pipe, lambda: list(pool.map(_Part.exchange, parts)).clear())
