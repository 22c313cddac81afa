"""The `shm://name` transport: two processes of one host, over a unix socket that passes memory.

The name is an abstract socket name: it disappears with its listener, and belongs to one network
namespace, as a TCP port does. Any process may take a free name, so both sides ask the system for
the other's user: only processes of one user talk to each other.
"""

from __future__ import annotations

import array
import errno
import os
import secrets
import socket
import struct
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trireme.certificates import Certificates
from trireme.errors import (
    AddressInUse,
    AuthenticationError,
    ConfigurationError,
    ConnectionRefused,
    ConnectTimeout,
    PeerClosed,
    WireError,
)
from trireme.shm.borrowed_memory import BorrowedMemory
from trireme.shm.lent_memory import LentMemory
from trireme.shm.memory import Lending, SharedMemory, available
from trireme.wire.shared_memory import LocalMemory
from trireme.wire.transport import Listener, Stream, Transport
from trireme.wire.transports.socket_stream import (
    BUFFER_BYTES,
    IOV_MAX,
    SocketListener,
    SocketStream,
    explain,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

_BACKLOG = 512
_ANCILLARY = socket.CMSG_LEN(4)  # for one descriptor: CMSG_SPACE would have room for two
_CREDENTIALS = struct.Struct("3i")


def shm_address(address: str) -> str:
    """Returns the shm address that belongs to a listener at a TCP address of this host."""
    return f"shm://trireme-{address.partition('://')[2]}"


def connect(rest: str, *, timeout: float, certificates: Certificates | None = None) -> Stream:
    """Connects to a name; see `trireme.wire.transport.connect`."""
    _require_linux()
    address = f"shm://{rest}"
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        client.settimeout(timeout)
        client.connect(_abstract(rest))
    except TimeoutError:
        client.close()
        raise ConnectTimeout(f"{address} did not accept within {timeout:g} s: it hangs") from None
    except OSError as error:
        client.close()
        if error.errno == errno.EAGAIN:
            raise ConnectTimeout(f"{address} has too many connections waiting: it hangs") from None
        raise ConnectionRefused(f"nothing listens at {address} on this host") from error
    if (user := _user_of(client)) != os.geteuid():
        client.close()
        raise AuthenticationError(
            f"a process of another user (uid {user}) listens at {address}, which is a name of "
            "this job: nothing was sent to it"
        )
    return ShmStream(client, address)


def listen(
    rest: str, *, allow_plaintext: bool, certificates: Certificates | None = None
) -> Listener:
    """Listens under a name; see `trireme.wire.transport.listen`."""
    _require_linux()
    name = rest or f"trireme-{secrets.token_hex(8)}"
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        server.bind(_abstract(name))
        server.listen(_BACKLOG)
    except OSError as error:
        server.close()
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(
                f"shm://{name} is taken by another process of this host: stop it, or choose "
                "another name"
            ) from error
        raise WireError(f"cannot listen at shm://{name}: {error.strerror}") from error
    address = f"shm://{name}"

    def admit(accepted: socket.socket, _: object) -> Stream | None:
        if _user_of(accepted) == os.geteuid():
            return ShmStream(accepted, f"{address}#client", accepted=True)
        accepted.close()
        return None

    return SocketListener(server, address, admit)


class ShmStream(SocketStream):
    """One end of a unix socket. The connecting side may pass descriptors, one at a time."""

    passes_descriptors = True

    def __init__(self, connected: socket.socket, peer: str, *, accepted: bool = False) -> None:
        super().__init__(connected, peer, peer.partition("#")[0])
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        self._outgoing: int | None = None
        self._incoming: int | None = None
        self._expects_descriptor = accepted

    def read_into(self, buffers: Sequence[memoryview]) -> int:
        if not self._expects_descriptor:
            return super().read_into(buffers)
        try:
            count, ancillary, _, _ = self._socket.recvmsg_into(
                buffers[:IOV_MAX], _ANCILLARY, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return 0
        except OSError as error:
            raise explain(error, self.peer) from error
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS and len(data) >= 4:
                # There is room for one descriptor. The system closes any other.
                self._incoming = array.array("i", data[:4])[0]
                self._expects_descriptor = False
        if count == 0:
            raise PeerClosed(f"{self.peer} closed the connection")
        return count

    def write(self, buffers: Sequence[Buffer]) -> int:
        if self._outgoing is None:
            return super().write(buffers)
        descriptor = array.array("i", [self._outgoing])
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptor)]
        try:
            count = self._socket.sendmsg(buffers[:IOV_MAX], rights)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise explain(error, self.peer) from error
        self._outgoing = None
        return count

    def pass_descriptor(self, descriptor: int) -> None:
        self._outgoing = descriptor

    def take_descriptor(self) -> int | None:
        taken, self._incoming = self._incoming, None
        return taken

    def expect_descriptor(self) -> None:
        self._expects_descriptor = True

    def close(self) -> None:
        super().close()
        if (unused := self.take_descriptor()) is not None:
            os.close(unused)


def _user_of(connected: socket.socket) -> int:
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(credentials)[1]
    return user


def _abstract(name: str) -> str:
    if not name or len(name) > 100 or "\0" in name:
        raise ConfigurationError(f"shm://{name} is not a valid name: give 1 to 100 characters")
    return f"\0{name}"


def _require_linux() -> None:
    if sys.platform != "linux":
        raise ConfigurationError("shm:// needs Linux: use tcp:// on this system")


SHM = Transport(
    "name",
    connect,
    listen,
    memory=LocalMemory(
        available, SharedMemory.create, Lending, LentMemory, BorrowedMemory, shm_address
    ),
)
