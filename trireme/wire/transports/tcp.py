"""The `tcp://host:port` transport."""

from __future__ import annotations

import errno
import ipaddress
import socket
import time
from typing import Any

import psutil

from trireme.errors import (
    AddressInUse,
    ConfigurationError,
    ConnectionRefused,
    ConnectTimeout,
    TriremeError,
    WireError,
)
from trireme.wire.transport import Listener, Stream
from trireme.wire.transports.socket_stream import BUFFER_BYTES, SocketListener, SocketStream

USER_TIMEOUT_SECONDS = 10
"""How long sent bytes may stay unacknowledged, or the peer's window shut, before the system gives
the connection up."""

_BACKLOG = 512

_Resolved = tuple[socket.AddressFamily, tuple[Any, ...]]


def connect(rest: str, *, timeout: float) -> Stream:
    """Connects to `host:port`; see `trireme.wire.transport.connect`."""
    host, port = _split(rest)
    deadline = time.monotonic() + timeout
    failure: OSError | None = None
    try:
        found = _lookup(host, port)
    except (OSError, UnicodeError) as error:
        raise ConnectTimeout(
            f"the host {host!r} is not known here ({error}): check the name and the resolver"
        ) from error
    for family, address in found:
        try:
            return _connect_once(family, address, rest, deadline - time.monotonic())
        except OSError as error:
            failure = error
    assert failure is not None  # a lookup gives at least one address
    raise _explain_connect(failure, rest) from failure


def listen(rest: str, *, allow_plaintext: bool) -> Listener:
    """Listens at `host:port`; see `trireme.wire.transport.listen`."""
    host, port = _split(rest)
    try:
        family, address = _lookup(host, port, socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(
            f"cannot listen at {host!r}: the name is not known here ({error})"
        ) from error
    if not allow_plaintext and not ipaddress.ip_address(address[0].split("%")[0]).is_loopback:
        raise ConfigurationError(
            f"listening at tcp://{rest} would let every host of the network reach this task, and "
            "without TLS they could read and change what is sent: listen on 127.0.0.1, or allow "
            "plaintext where you trust the network"
        )
    try:
        listening = _listen_once(family, address)
    except OSError as error:
        raise _explain_listen(error, rest, port) from error
    return SocketListener(listening, _url(host, listening.getsockname()[1]), _admit)


def _admit(accepted: socket.socket, peer: tuple[Any, ...]) -> Stream | None:
    try:
        return _stream(accepted, _url(peer[0], peer[1]), accepted.getsockname())
    except OSError:  # reset by now: some systems then refuse the options
        accepted.close()
        return None


def _connect_once(
    family: socket.AddressFamily, address: tuple[Any, ...], rest: str, seconds: float
) -> Stream:
    connecting = socket.socket(family, socket.SOCK_STREAM)
    try:
        _set_buffers(connecting)
        connecting.settimeout(max(seconds, 0.001))
        connecting.connect(address)
        if connecting.getsockname() == connecting.getpeername():
            # A self-connection: the system chose the called port as the local one.
            raise ConnectionRefusedError(errno.ECONNREFUSED, "nothing listens there")
        return _stream(connecting, f"tcp://{rest}", connecting.getpeername())
    except OSError:
        connecting.close()
        raise


def _listen_once(family: socket.AddressFamily, address: tuple[Any, ...]) -> socket.socket:
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Set before listening: accepted sockets inherit the sizes, and the window scales to them.
        _set_buffers(listening)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


def _stream(connected: socket.socket, peer: str, called: tuple[Any, ...]) -> SocketStream:
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_USER_TIMEOUT", USER_TIMEOUT_SECONDS * 1000),
        ("TCP_KEEPIDLE", USER_TIMEOUT_SECONDS // 2),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", USER_TIMEOUT_SECONDS // 2),
    ):
        option = getattr(socket, name, None)  # not every system has each of them
        if option is not None:
            connected.setsockopt(socket.IPPROTO_TCP, option, value)
    return SocketStream(connected, peer, _called(called))


def _set_buffers(unconnected: socket.socket) -> None:
    unconnected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    unconnected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)


def _split(rest: str) -> tuple[str, int]:
    host, separator, digits = rest.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        separator = ""
    if not separator or not digits.isascii() or not digits.isdigit() or int(digits) > 65535:
        raise ConfigurationError(
            f"the address 'tcp://{rest}' is not of the form tcp://host:port or "
            "tcp://[ipv6]:port with a port from 0 to 65535"
        )
    return host, int(digits)


def _called(name: tuple[Any, ...]) -> str:
    """Returns a socket's name as an address; IPv4 mapped into IPv6 becomes plain IPv4."""
    host = ipaddress.ip_address(name[0].split("%")[0])
    mapped = host.ipv4_mapped if isinstance(host, ipaddress.IPv6Address) else None
    return _url(str(mapped or host), name[1])


def _url(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _lookup(host: str, port: int, flags: int = 0) -> list[_Resolved]:
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=flags)
    return [(socket.AddressFamily(entry[0]), entry[4]) for entry in found]


def _explain_connect(error: OSError, rest: str) -> WireError:
    if isinstance(error, ConnectionRefusedError):
        return ConnectionRefused(
            f"nothing listens at tcp://{rest}: check that the task there has started, and the port"
        )
    reason = error.strerror or str(error)
    if isinstance(error, TimeoutError):
        reason = "no answer in time"
    elif error.errno not in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return WireError(f"cannot connect to tcp://{rest}: {reason}")
    return ConnectTimeout(
        f"cannot reach tcp://{rest}: {reason}; check the host, the port and the firewall"
    )


def _explain_listen(error: OSError, rest: str, port: int) -> TriremeError:
    if error.errno == errno.EADDRINUSE:
        return AddressInUse(
            f"tcp://{rest} is taken by {_holder(port)}: stop it, or choose another port (0 leaves "
            "the choice to the system)"
        )
    if error.errno in (errno.EADDRNOTAVAIL, errno.EACCES, errno.EAFNOSUPPORT):
        return ConfigurationError(
            f"cannot listen at tcp://{rest}: {error.strerror}; the host must be one of this "
            "machine's addresses and the port one that this user may open"
        )
    return WireError(f"cannot listen at tcp://{rest}: {error.strerror or error}")


def _holder(port: int) -> str:
    """Returns the process that listens at a port, as far as this user may see it."""
    try:
        for entry in psutil.net_connections(kind="tcp"):
            here = entry.laddr and entry.laddr.port == port
            if here and entry.status == psutil.CONN_LISTEN and entry.pid:
                command = " ".join(psutil.Process(entry.pid).cmdline())[:200]
                return f"process {entry.pid} ({command})"
    except (psutil.Error, OSError):
        pass
    return "a process that this user may not see"
