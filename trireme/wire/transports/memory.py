"""The `memory://name` transport: connections inside one process, under the same rules as TCP."""

from __future__ import annotations

import itertools
import socket
import threading
from collections import deque

from trireme.errors import (
    AddressInUse,
    ConnectionClosed,
    ConnectionRefused,
    ConnectTimeout,
    WireError,
)
from trireme.wire.transport import Listener, Stream
from trireme.wire.transports.socket_stream import BUFFER_BYTES, SocketStream

__all__ = ["MemoryListener", "Names", "connect", "listen"]

_BACKLOG = 512


class Names:
    """The listeners of this process by name. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: dict[str, MemoryListener] = {}
        self._numbers = itertools.count(1)

    def listen(self, name: str) -> MemoryListener:
        """Listens under a name. If it is empty, a name is chosen.

        Raises:
            AddressInUse: the name is taken.
            WireError: the system refuses to open another socket.
        """
        with self._lock:
            name = name or f"listener-{next(self._numbers)}"
            if name in self._listeners:
                raise AddressInUse(
                    f"memory://{name} is taken by another listener of this process: close it, or "
                    "choose another name"
                )
            listener = MemoryListener(name, self)
            self._listeners[name] = listener
        return listener

    def connect(self, name: str) -> Stream:
        """Connects to the listener of a name.

        Raises:
            ConnectionRefused: no listener has this name.
            ConnectTimeout: too many connections wait for the listener.
            WireError: the system refuses to open another socket.
        """
        with self._lock:
            listener = self._listeners.get(name)
            if listener is None:
                raise ConnectionRefused(
                    f"nothing listens at memory://{name} in this process: check the name"
                )
            return listener.admit()

    def release(self, name: str) -> None:
        """Frees a name."""
        with self._lock:
            self._listeners.pop(name, None)


_NAMES = Names()  # of this process, as an address is only a string


def connect(rest: str, *, timeout: float) -> Stream:
    """Connects to a name, without waiting; see `trireme.wire.transport.connect`."""
    return _NAMES.connect(rest)


def listen(rest: str, *, allow_plaintext: bool) -> Listener:
    """Listens under a name; see `trireme.wire.transport.listen`."""
    return _NAMES.listen(rest)


class MemoryListener(Listener):
    """A queue of connected streams, with a socket that is readable while it is not empty."""

    def __init__(self, name: str, names: Names) -> None:
        self.address = f"memory://{name}"
        self._name = name
        self._names = names
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
        """Returns one end of a new connection and queues the other. Called under the names' lock.

        Raises:
            ConnectTimeout: too many connections wait.
        """
        if len(self._waiting) >= _BACKLOG:
            raise ConnectTimeout(f"{self.address} has {_BACKLOG} connections waiting: it hangs")
        ours, theirs = _pair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        self._waiting.append(SocketStream(theirs, f"{self.address}#client", self.address))
        self._wakeup_writer.send(b"\0")
        return SocketStream(ours, self.address, self.address)

    def close(self) -> None:
        self._names.release(self._name)
        self._wakeup_reader.close()
        self._wakeup_writer.close()
        while self._waiting:
            self._waiting.popleft().close()


def _pair() -> tuple[socket.socket, socket.socket]:
    try:
        return socket.socketpair()
    except OSError as error:
        raise WireError(f"cannot open a connection in this process: {error.strerror}") from error
