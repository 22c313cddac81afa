"""A TCP proxy on loopback that delays, slows, holds, loses or cuts what goes through it.

Proxy    stands for the network between one listener and its clients
Proxies  has every parameter server's clients in this process go through such a proxy
"""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from unittest import mock

from tests.faults.frames import Break, Splitter, Treatment
from trireme.certificates import Certificates
from trireme.wire import transport
from trireme.wire.transport import Stream

IDLE_SECONDS = 0.05
"""After this a held frame goes on although none has overtaken it."""
SLICE_SECONDS = 0.01
"""A slow link passes on what it can pass in this time at once."""


class Way:
    """One direction through a proxy, of all its connections.

    Attributes:
        delay: seconds that each piece is held back.
        rate: bytes a second that pass; None for as many as come.
        lossy: whether what comes is lost, while its sender believes that it arrived: half of a
            connection is open. The connection is no use afterwards, as bytes are missing in it.
        treatment: makes what is done to the frames of each connection; None leaves bytes alone.
    """

    def __init__(self) -> None:
        self.delay = 0.0
        self.rate: float | None = None
        self.lossy = False
        self.treatment: Callable[[], Treatment] | None = None
        self._flowing = threading.Event()
        self._flowing.set()

    def hold(self) -> None:
        """Forwards nothing for now; what comes is kept."""
        self._flowing.clear()

    def flow(self) -> None:
        """Forwards what was held."""
        self._flowing.set()

    def pass_on(self, data: bytes, send: Callable[[bytes], object]) -> None:
        """Sends a piece when and as this way lets it."""
        self._flowing.wait()
        if self.lossy:
            return
        if self.delay:
            _pause(self.delay)
        if self.rate is None:
            send(data)
            return
        size = max(1, int(self.rate * SLICE_SECONDS))
        for start in range(0, len(data), size):
            piece = data[start : start + size]
            _pause(len(piece) / self.rate)
            send(piece)


def _pause(seconds: float) -> None:
    threading.Event().wait(seconds)


class Proxy:
    """Forwards connections to another address of this host, well or badly.

    Args:
        target: `tcp://host:port`, or `tls://host:port`, whose bytes it cannot read.
        lifetimes: how many bytes each of the connections to come lives for, both directions
            counted together; it is reset in the middle of what it carries then.

    Who connects through one is to believe that there is none: see `unnoticed`.

    Attributes:
        address: where it listens, with its scheme.
        up, down: what happens on the way to the target, and on the way back.
        connections, cuts: how many there were.
    """

    def __init__(self, target: str, lifetimes: Callable[[], int | None] = lambda: None) -> None:
        scheme, _, rest = target.partition("://")
        host, _, port = rest.rpartition(":")
        self._target = (host, int(port))
        self._lifetimes = lifetimes
        self.up, self.down = Way(), Way()
        self.connections = 0
        self.cuts = 0
        self._open: set[_Pair] = set()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"{scheme}://127.0.0.1:{self._listener.getsockname()[1]}"
        _targets[self.address] = target
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def ways(self) -> tuple[Way, Way]:
        """Both directions."""
        return self.up, self.down

    def delay(self, seconds: float) -> None:
        """Holds each piece back for so long, in both directions."""
        for way in self.ways:
            way.delay = seconds

    def hold(self) -> None:
        """Forwards nothing for now; what comes is kept."""
        for way in self.ways:
            way.hold()

    def flow(self) -> None:
        """Forwards what was held."""
        for way in self.ways:
            way.flow()

    def cut(self) -> None:
        """Resets all connections."""
        with self._lock:
            pairs, self._open = self._open, set()
            self.cuts += len(pairs)
        for pair in pairs:
            pair.reset()

    def close(self) -> None:
        """Resets all connections and listens no longer."""
        _targets.pop(self.address, None)  # the port may be given to a real server next
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        self.flow()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target, timeout=5.0)
            except OSError:
                _reset(near)
                continue
            self.connections += 1
            for end in (near, far):
                end.settimeout(None)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pair = _Pair(near, far, self._lifetimes())
            with self._lock:
                self._open.add(pair)
            for way, *ends in ((self.up, near, far), (self.down, far, near)):
                threading.Thread(target=self._carry, args=(pair, way, *ends), daemon=True).start()

    def _carry(self, pair: _Pair, way: Way, source: socket.socket, sink: socket.socket) -> None:
        """Carries one direction of one connection to its end."""

        def send(data: bytes) -> None:
            kept = pair.spend(len(data))
            sink.sendall(data[:kept])
            if kept < len(data):
                raise Break(data[:kept])

        try:
            pieces = _pieces(source) if way.treatment is None else _treated(source, way.treatment())
            for piece in pieces:
                way.pass_on(piece, send)
            if not pair.broken:  # whoever broke it has woken this thread
                sink.shutdown(socket.SHUT_WR)
            return
        except Break:
            with self._lock:
                self.cuts += 1
            pair.reset()
        except OSError:
            pass
        with self._lock:
            self._open.discard(pair)


def _pieces(source: socket.socket) -> Iterable[bytes]:
    while data := source.recv(1 << 16):
        yield data


def _treated(source: socket.socket, treatment: Treatment) -> Iterable[bytes]:
    """Yields what a treatment makes of the frames that come."""
    splitter = Splitter()
    # A receive timeout of the system's, as Python's would also hold for sending on this socket.
    seconds = struct.pack("ll", int(IDLE_SECONDS), int(IDLE_SECONDS % 1 * 1e6))
    source.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)
    while True:
        try:
            data = source.recv(1 << 16)
        except BlockingIOError:
            yield from treatment.idle()
            continue
        if not data:
            return
        for frame in splitter.feed(data):
            try:
                yield from treatment.treat(frame)
            except Break as end:
                yield end.passed
                raise


_targets: dict[str, str] = {}  # of each proxy of this process that listens


def unnoticed(address: str, *, timeout: float, certificates: Certificates | None = None) -> Stream:
    """Connects as `transport.connect` does, and takes a proxy on loopback for its target.

    Handshakes find out what passes them on; proxies here stand for the network, which does too.
    """
    stream = transport.connect(address, timeout=timeout, certificates=certificates)
    stream.called = _targets.get(address, stream.called)
    return stream


class _Pair:
    """The two connections of one that goes through, and how many bytes it has left."""

    def __init__(self, near: socket.socket, far: socket.socket, lifetime: int | None) -> None:
        self._ends = (near, far)
        self._left = lifetime
        self._lock = threading.Lock()
        self.broken = False

    def spend(self, count: int) -> int:
        """Returns how many of so many bytes may pass."""
        with self._lock:
            if self._left is None:
                return count
            passed = min(count, self._left)
            self._left -= passed
            return passed

    def reset(self) -> None:
        self.broken = True
        for end in self._ends:
            _reset(end)


def _reset(end: socket.socket) -> None:
    """Closes a connection the hard way: the peer is told that it broke, not that it ended."""
    with suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        # Wakes a thread that waits in recv, which close alone does not; no FIN is sent for it
        # because the reset below is quicker than the kernel's wish to be polite.
        end.shutdown(socket.SHUT_RD)
    end.close()


class Proxies:
    """Leads the parameter server's clients in this process through proxies, one for each server.

    To be used as a context manager around the whole job.

    Args:
        seed: chooses after how many bytes each connection is cut.
        mean_lifetime: how many bytes that is on average; None: none is cut but by `cut`.
        prepare: called with each proxy before anything goes through it.
    """

    def __init__(
        self,
        seed: int = 0,
        mean_lifetime: int | None = None,
        prepare: Callable[[Proxy], object] = lambda proxy: None,
    ) -> None:
        self._random = random.Random(seed)
        self._mean = mean_lifetime
        self._prepare = prepare
        self._lock = threading.Lock()
        self.by_server: dict[str, Proxy] = {}
        self._patch = mock.patch("trireme.ps.dialing.connect", self._connect)

    def __enter__(self) -> Proxies:
        self._patch.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._patch.stop()
        for proxy in self.by_server.values():
            proxy.close()

    @property
    def cuts(self) -> int:
        """How many connections were cut."""
        return sum(proxy.cuts for proxy in self.by_server.values())

    def _lifetime(self) -> int | None:
        return None if self._mean is None else int(self._random.expovariate(1 / self._mean))

    def _connect(
        self, address: str, *, timeout: float, certificates: Certificates | None = None
    ) -> Stream:
        with self._lock:
            if address not in self.by_server:
                self.by_server[address] = Proxy(address, self._lifetime)
                self._prepare(self.by_server[address])
        proxy = self.by_server[address].address
        return unnoticed(proxy, timeout=timeout, certificates=certificates)
