"""How long a push and its reply take over loopback, beside bare sockets that do the same.

    python benchmarks/wire_roundtrip.py [--bytes N] [--seconds S] [--pairs P]

A client process and a server process exchange N bytes each way. *bare* is blocking sockets with
the same options, a fixed header and no checks; *wire* is `Connection` on one side and `Service` on
the other, the way workers and parameter servers talk. They are measured in alternation, so that the
machine's moods meet both; the ratio is the median over the pairs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import struct
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection as Pipe
from typing import ClassVar

from trireme.errors import WireError
from trireme.wire.connection import Connection, Incoming
from trireme.wire.handshake import Identity, authenticate
from trireme.wire.message import Catalog, Message
from trireme.wire.service import Link, Service
from trireme.wire.transport import connect, listen
from trireme.wire.transports.socket_stream import BUFFER_BYTES

JOB, SECRET = "benchmark", b"benchmark"
HEADER = struct.Struct("!QQQQ")


class Update(Message, frozen=True, array_like=True):
    """About what a push's metadata is."""

    kind: ClassVar[int] = 200
    worker: int
    sequence: int
    weight: float


class Exchange:
    """Answers each update with values of the same size."""

    messages = (Update,)

    def __init__(self, size: int) -> None:
        self._gradient = [memoryview(bytearray(size))]
        self._values = [memoryview(bytearray(size))]

    def authenticated(self, link: Link) -> None:
        link.destination = lambda message, size: self._gradient

    def received(self, link: Link, incoming: Incoming) -> None:
        link.offer(incoming.message, self._values, sequence=incoming.sequence)

    def closed(self, link: Link, error: WireError | None) -> None:
        pass

    def tick(self, now: float) -> None:
        pass


def serve_wire(size: int, pipe: Pipe) -> None:
    service = Service(listen("tcp://127.0.0.1:0"), [Exchange(size)], job=JOB, secret=SECRET)
    pipe.send(service.address)
    service.run()


def wire_client(size: int, address: str) -> Callable[[], None]:
    values = [memoryview(bytearray(size))]
    gradient = [memoryview(bytearray(size))]
    connection = Connection(
        connect(address, timeout=5), Catalog([Update]), destination=lambda message, size: values
    )
    authenticate(connection, Identity(JOB, "worker:0"), SECRET, timeout=5)
    message = Update(0, 1, 100.0)

    def exchange() -> None:
        connection.send(message, gradient, sequence=1, timeout=5)
        connection.receive(timeout=5)

    return exchange


def serve_bare(size: int, pipe: Pipe) -> None:
    listener = bare_socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    pipe.send(listener.getsockname())
    connected, _ = listener.accept()
    header, gradient = memoryview(bytearray(HEADER.size)), memoryview(bytearray(size))
    values = bytearray(size)
    while True:
        fill(connected, header)
        fill(connected, gradient)
        send_all(connected, [HEADER.pack(1, 2, 3, size), values])


def bare_client(size: int, address: tuple[str, int]) -> Callable[[], None]:
    connected = bare_socket()
    connected.connect(address)
    header, values = memoryview(bytearray(HEADER.size)), memoryview(bytearray(size))
    gradient = bytearray(size)

    def exchange() -> None:
        send_all(connected, [HEADER.pack(1, 2, 3, size), gradient])
        fill(connected, header)
        fill(connected, values)

    return exchange


def bare_socket() -> socket.socket:
    bare = socket.socket()
    bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted sockets inherit them
    bare.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    bare.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    return bare


def fill(connected: socket.socket, view: memoryview) -> None:
    done = 0
    while done < len(view):
        count = connected.recv_into(view[done:])
        if not count:
            raise SystemExit
        done += count


def send_all(connected: socket.socket, parts: Sequence[bytes | bytearray]) -> None:
    sent = connected.sendmsg(parts)
    if sent < sum(map(len, parts)):
        connected.sendall(b"".join(parts)[sent:])


def start(
    serve: Callable[[int, Pipe], None], client: Callable[..., Callable[[], None]], size: int
) -> Callable[[], None]:
    here, there = multiprocessing.Pipe()
    multiprocessing.Process(target=serve, args=(size, there), daemon=True).start()
    return client(size, here.recv())


def microseconds(exchange: Callable[[], None], seconds: float) -> float:
    """Returns the mean time of one exchange."""
    count = 0
    begin = time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < seconds:
        exchange()
        count += 1
    return elapsed / count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=int, default=318_040, help="payload each way")
    parser.add_argument("--seconds", type=float, default=0.2, help="of one measurement")
    parser.add_argument("--pairs", type=int, default=25, help="of measurements")
    options = parser.parse_args()
    bare = start(serve_bare, bare_client, options.bytes)
    wire = start(serve_wire, wire_client, options.bytes)
    pairs = [
        (microseconds(bare, options.seconds), microseconds(wire, options.seconds))
        for _ in range(options.pairs + 1)
    ][1:]  # the first warms up
    print(f"{options.bytes} bytes each way, median of {len(pairs)} pairs")
    print(f"bare sockets {statistics.median(pair[0] for pair in pairs):8.0f} us")
    print(f"wire         {statistics.median(pair[1] for pair in pairs):8.0f} us")
    print(f"wire / bare  {statistics.median(pair[1] / pair[0] for pair in pairs):8.2f}")


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    main()
