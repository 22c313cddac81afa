"""The `memory://name` transport of tests: connections inside one process, by the rules of TCP."""

from __future__ import annotations

import itertools
import socket
import threading
from collections import deque

from trireme.certificates import Certificates
from trireme.errors import (
    AddressInUse,
    ConnectionClosed,
    ConnectionRefused,
    ConnectTimeout,
    WireError,
)
from trireme.wire.transport import Listener, Stream, Transport
from trireme.wire.transports.socket_stream import BUFFER_BYTES, SocketStream

_BACKLOG = 512


# The listeners of this process by name, as an address is only a string. Used under the lock.
_LISTENERS: dict[str, MemoryListener] = {}
_LOCK = threading.Lock()
_NUMBERS = itertools.count(1)


def connect(rest: str, *, timeout: float, certificates: Certificates | None = None) -> Stream:
    """Connects to a name, without waiting; see `trireme.wire.transport.connect`."""
    with _LOCK:
        listener = _LISTENERS.get(rest)
        if listener is None:
            raise ConnectionRefused(
                f"nothing listens at memory://{rest} in this process: check the name"
            )
        return listener.admit()


def listen(
    rest: str, *, allow_plaintext: bool = False, certificates: Certificates | None = None
) -> MemoryListener:
    """Listens under a name; see `trireme.wire.transport.listen`."""
    with _LOCK:
        name = rest or f"listener-{next(_NUMBERS)}"
        if name in _LISTENERS:
            raise AddressInUse(
                f"memory://{name} is taken by another listener of this process: close it, or "
                "choose another name"
            )
        listener = _LISTENERS[name] = MemoryListener(name)
    return listener


class MemoryListener(Listener):
    """A queue of connected streams, with a socket that is readable while it is not empty."""

    def __init__(self, name: str) -> None:
        self.address = f"memory://{name}"
        self._name = name
        self._waiting: deque[Stream] = deque()
        self._wakeup_reader, self._wakeup_writer = _pair()
        self._wakeup_reader.setblocking(False)

    def fileno(self) -> int:
        return self._wakeup_reader.fileno()

    def accept(self) -> Stream | None:
        if self._wakeup_reader.fileno() < 0:
            raise ConnectionClosed(f"{self.address} was closed by this side")
        try:
            self._wakeup_reader.recv(1)
        except BlockingIOError:
            return None
        return self._waiting.popleft()

    def admit(self) -> Stream:
        """Returns one end of a new connection and queues the other. Called under the lock."""
        if len(self._waiting) >= _BACKLOG:
            raise ConnectTimeout(f"{self.address} has {_BACKLOG} connections waiting: it hangs")
        ours, theirs = _pair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        self._waiting.append(SocketStream(theirs, f"{self.address}#client", self.address))
        self._wakeup_writer.send(b"\0")
        return SocketStream(ours, self.address, self.address)

    def close(self) -> None:
        with _LOCK:
            if _LISTENERS.get(self._name) is self:
                del _LISTENERS[self._name]
        self._wakeup_reader.close()
        self._wakeup_writer.close()
        while self._waiting:
            self._waiting.popleft().close()


def _pair() -> tuple[socket.socket, socket.socket]:
    try:
        return socket.socketpair()
    except OSError as error:
        raise WireError(f"cannot open a connection in this process: {error.strerror}") from error


MEMORY = Transport("name", connect, listen)
