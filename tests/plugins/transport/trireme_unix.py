"""The `unix://NAME` transport: sockets of this host, which need no port."""

import errno
import secrets
import socket

from trireme.certificates import Certificates
from trireme.errors import AddressInUse, ConnectionRefused, ConnectTimeout, WireError
from trireme.wire.transport import Listener, Stream, Transport
from trireme.wire.transports.socket_stream import BUFFER_BYTES, SocketListener, SocketStream


def connect(rest: str, *, timeout: float, certificates: Certificates | None) -> Stream:
    address, client = f"unix://{rest}", socket.socket(socket.AF_UNIX)
    try:
        client.settimeout(timeout)
        client.connect(path(rest))
    except TimeoutError:
        client.close()
        raise ConnectTimeout(f"{address} did not accept within {timeout:g} s: it hangs") from None
    except OSError as error:
        client.close()
        raise ConnectionRefused(f"nothing listens at {address} on this host") from error
    return stream(client, address, address)


def listen(rest: str, *, allow_plaintext: bool, certificates: Certificates | None) -> Listener:
    host, _, port = rest.rpartition(":")
    name = rest if port not in ("", "0") else f"{host}:{secrets.randbits(48)}"
    address, server = f"unix://{name}", socket.socket(socket.AF_UNIX)
    try:
        server.bind(path(name))
        server.listen(512)
    except OSError as error:
        server.close()
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(f"{address} is taken by another: choose another name") from error
        raise WireError(f"cannot listen at {address}: {error.strerror}") from error

    def admit(accepted: socket.socket, _: object) -> Stream | None:
        return stream(accepted, f"{address}#client", address)

    return SocketListener(server, address, admit)


def stream(connected: socket.socket, peer: str, called: str) -> Stream:
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    return SocketStream(connected, peer, called)


def path(name: str) -> str:
    return f"\0trireme-unix-{name}"  # not in the file system: it disappears with its listener


UNIX = Transport("name", connect, listen, serves_jobs=True)
