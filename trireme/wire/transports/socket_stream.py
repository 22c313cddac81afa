"""Streams over connected sockets, for TCP, unix and in-process connections, and their listeners."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from trireme.errors import ConnectionBroken, ConnectionClosed, NetworkLost, PeerClosed, WireError
from trireme.wire.transport import Listener, Stream

if TYPE_CHECKING:
    from typing_extensions import Buffer

IOV_MAX = os.sysconf("SC_IOV_MAX")  # how many buffers the system takes in one call

_NETWORK_LOST = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)

BUFFER_BYTES = 4 << 20  # of a socket, as requested; the system may grant less


class SocketStream(Stream):
    """A connected stream socket, which this object owns."""

    def __init__(self, connected: socket.socket, peer: str, called: str = "") -> None:
        connected.setblocking(False)
        self._socket = connected
        self.peer = peer
        self.called = called

    def fileno(self) -> int:
        return self._socket.fileno()

    def read_into(self, buffers: Sequence[memoryview]) -> int:
        try:
            if len(buffers) == 1:
                count = self._socket.recv_into(buffers[0])
            else:
                count = self._socket.recvmsg_into(buffers[:IOV_MAX])[0]
        except BlockingIOError:
            return 0
        except OSError as error:
            raise explain(error, self.peer) from error
        if count == 0:
            raise PeerClosed(f"{self.peer} closed the connection")
        return count

    def write(self, buffers: Sequence[Buffer]) -> int:
        try:
            if len(buffers) == 1:
                return self._socket.send(buffers[0])
            return self._socket.sendmsg(buffers if len(buffers) <= IOV_MAX else buffers[:IOV_MAX])
        except BlockingIOError:
            return 0
        except OSError as error:
            raise explain(error, self.peer) from error

    def close(self) -> None:
        self._socket.close()


class SocketListener(Listener):
    """A listening socket, which this object owns; `admit` makes streams of accepted ones."""

    def __init__(
        self,
        listening: socket.socket,
        address: str,
        admit: Callable[[socket.socket, Any], Stream | None],
    ) -> None:
        listening.setblocking(False)
        self.address = address
        self._socket = listening
        self._admit = admit

    def fileno(self) -> int:
        return self._socket.fileno()

    def accept(self) -> Stream | None:
        while True:
            try:
                accepted, peer = self._socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return None
            except OSError as error:
                if error.errno == errno.EBADF:
                    raise ConnectionClosed(f"{self.address} was closed by this side") from error
                raise WireError(f"{self.address} cannot accept: {error.strerror}") from error
            stream = self._admit(accepted, peer)
            if stream is not None:
                return stream

    def close(self) -> None:
        self._socket.close()


def explain(error: OSError, peer: str) -> WireError:
    """Returns the `WireError` for a failed read or write of a socket; names the peer."""
    if error.errno == errno.EBADF:
        return ConnectionClosed(f"the connection to {peer} was closed by this side")
    if error.errno == errno.EPIPE:
        return PeerClosed(f"{peer} closed the connection")
    kind = NetworkLost if error.errno in _NETWORK_LOST else ConnectionBroken
    return kind(f"the connection to {peer} broke: {error.strerror or error}")
