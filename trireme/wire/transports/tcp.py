"""The `tcp://host:port` transport."""

from __future__ import annotations

import errno
import ipaddress
import logging
import re
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import psutil

from trireme.certificates import Certificates
from trireme.errors import (
    AddressInUse,
    ConfigurationError,
    ConnectionBroken,
    ConnectionRefused,
    ConnectTimeout,
    TriremeError,
    WireError,
)
from trireme.wire.transport import Listener, Stream, Transport
from trireme.wire.transports.socket_stream import BUFFER_BYTES, SocketListener, SocketStream

USER_TIMEOUT_SECONDS = 10
"""How long sent bytes may stay unacknowledged, or the peer's window shut, before the system gives
the connection up."""

_BACKLOG = 512
_EVERY_ADDRESS = {socket.AF_INET: "0.0.0.0", socket.AF_INET6: "::"}
_LOCAL_NAME = re.compile(r"(ip6-)?(localhost|loopback)[46]?(\..*)?|.*\.localhost", re.IGNORECASE)

_log = logging.getLogger(__name__)

_Resolved = tuple[socket.AddressFamily, tuple[Any, ...]]


def connect(rest: str, *, timeout: float, certificates: Certificates | None = None) -> Stream:
    """Connects to `host:port`; see `trireme.wire.transport.connect`."""
    connected, called = dial(rest, timeout, "tcp")
    return SocketStream(connected, f"tcp://{rest}", called)


def dial(rest: str, timeout: float, scheme: str) -> tuple[socket.socket, str]:
    """Connects to `host:port`; returns the socket, and the address that it has called."""
    host, port = _split(rest, scheme)
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
            return _connect_once(family, address, scheme, deadline - time.monotonic())
        except OSError as error:
            failure = error
    assert failure is not None  # a lookup gives at least one address
    raise _explain_connect(failure, f"{scheme}://{rest}") from failure


def listen(
    rest: str, *, allow_plaintext: bool, certificates: Certificates | None = None
) -> Listener:
    """Listens at `host:port`; see `trireme.wire.transport.listen`."""
    return bind(rest, "tcp", SocketStream, allow_plaintext=allow_plaintext)


def bind(
    rest: str,
    scheme: str,
    open_stream: Callable[[socket.socket, str, str], Stream],
    *,
    allow_plaintext: bool = True,
) -> Listener:
    """Listens at `host:port`; makes a stream of each socket, the peer's and the called address.

    Where plain text is allowed, a name that has a loopback address here stands for every address.
    """
    host, port = _split(rest, scheme)
    try:
        family, address = _lookup(host, port, socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(
            f"cannot listen at {host!r}: the name is not known here ({error})"
        ) from error
    loopback = ipaddress.ip_address(address[0].split("%")[0]).is_loopback
    if allow_plaintext and loopback and _names_a_machine(host):
        every = _EVERY_ADDRESS[family]
        _log.warning(
            "%s is %s on this machine (as Debian's /etc/hosts has it), which other hosts cannot "
            "reach: listening at every address of the machine",
            host,
            address[0],
        )
        address = (every, *address[1:])
    if not allow_plaintext and not loopback:
        raise ConfigurationError(
            f"listening at tcp://{rest} would let every host of the network reach this task, and "
            "without TLS they could read and change what is sent: give each task a certificate "
            "(`trireme certs init DIR`, then `trireme certs issue DIR --task ps:0` and so on), "
            "listen on 127.0.0.1, or allow plaintext where you trust the network"
        )
    with ExitStack() as failed:
        try:
            listening = failed.enter_context(socket.socket(family, socket.SOCK_STREAM))
            # Before listening: accepted sockets inherit the sizes, and the window scales to them.
            _set_buffers(listening)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(_BACKLOG)
        except OSError as error:
            raise _explain_listen(error, f"{scheme}://{rest}", port) from error
        failed.pop_all()

    def admit(accepted: socket.socket, peer: tuple[Any, ...]) -> Stream | None:
        try:
            called = prepare(accepted, accepted.getsockname(), scheme)
        except OSError:  # reset by now: some systems then refuse the options
            accepted.close()
            return None
        return open_stream(accepted, url(scheme, *peer[:2]), called)

    return SocketListener(listening, url(scheme, host, listening.getsockname()[1]), admit)


def _names_a_machine(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return _LOCAL_NAME.fullmatch(host) is None
    return False


def _connect_once(
    family: socket.AddressFamily, address: tuple[Any, ...], scheme: str, seconds: float
) -> tuple[socket.socket, str]:
    connecting = socket.socket(family, socket.SOCK_STREAM)
    try:
        _set_buffers(connecting)
        connecting.settimeout(max(seconds, 0.001))
        connecting.connect(address)
        if connecting.getsockname() == connecting.getpeername():
            # A self-connection: the system chose the called port as the local one.
            raise ConnectionRefusedError(errno.ECONNREFUSED, "nothing listens there")
        return connecting, prepare(connecting, connecting.getpeername(), scheme)
    except OSError:
        connecting.close()
        raise


def prepare(connected: socket.socket, called: tuple[Any, ...], scheme: str) -> str:
    """Sets a connected socket's options; returns the called address, or raises `OSError`."""
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
    # IPv4 mapped into IPv6 becomes plain IPv4.
    host = ipaddress.ip_address(called[0].split("%")[0])
    mapped = host.ipv4_mapped if isinstance(host, ipaddress.IPv6Address) else None
    return url(scheme, str(mapped or host), called[1])


def _set_buffers(unconnected: socket.socket) -> None:
    unconnected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    unconnected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)


def _split(rest: str, scheme: str) -> tuple[str, int]:
    host, separator, digits = rest.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        separator = ""
    if not separator or not digits.isascii() or not digits.isdigit() or int(digits) > 65535:
        raise ConfigurationError(
            f"the address '{scheme}://{rest}' is not of the form {scheme}://host:port or "
            f"{scheme}://[ipv6]:port with a port from 0 to 65535"
        )
    return host, int(digits)


def url(scheme: str, host: str, port: int) -> str:
    """Returns an address; brackets an IPv6 host."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _lookup(host: str, port: int, flags: int = 0) -> list[_Resolved]:
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=flags)
    return [(socket.AddressFamily(entry[0]), entry[4]) for entry in found]


def _explain_connect(error: OSError, address: str) -> WireError:
    if isinstance(error, ConnectionRefusedError):
        return ConnectionRefused(
            f"nothing listens at {address}: check that the task there has started, and the port"
        )
    reason = error.strerror or str(error)
    if isinstance(error, TimeoutError):
        reason = "no answer in time"
    elif error.errno in (errno.ECONNRESET, errno.ENOTCONN):
        return ConnectionBroken(f"{address} reset the connection at once: the task there ends")
    elif error.errno not in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN):
        return WireError(f"cannot connect to {address}: {reason}")
    return ConnectTimeout(
        f"cannot reach {address}: {reason}; check the host, the port and the firewall"
    )


def _explain_listen(error: OSError, address: str, port: int) -> TriremeError:
    if error.errno == errno.EADDRINUSE:
        return AddressInUse(
            f"{address} is taken by {_holder(port)}: stop it, or choose another port (0 leaves "
            "the choice to the system)"
        )
    if error.errno in (errno.EADDRNOTAVAIL, errno.EACCES, errno.EAFNOSUPPORT):
        return ConfigurationError(
            f"cannot listen at {address}: {error.strerror}; the host must be one of this "
            "machine's addresses and the port one that this user may open"
        )
    return WireError(f"cannot listen at {address}: {error.strerror or error}")


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


TCP = Transport("host:port", connect, listen, between_hosts=True, serves_jobs=True)
