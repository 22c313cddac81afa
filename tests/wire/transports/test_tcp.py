from __future__ import annotations

import errno
import os
import select
import socket
import struct
import sys

import pytest

from tests.conformance import CATALOG, PATIENCE, Note, wait_readable
from trireme.errors import (
    AddressInUse,
    ConfigurationError,
    ConnectionBroken,
    ConnectionRefused,
    ConnectTimeout,
    NetworkLost,
    PeerClosed,
    WireError,
)
from trireme.wire.connection import Connection
from trireme.wire.transport import Listener, Stream, connect, listen
from trireme.wire.transports import tcp
from trireme.wire.transports.socket_stream import SocketListener, SocketStream, explain

LOOPBACK = "tcp://127.0.0.1:0"


def connected() -> tuple[Stream, Stream]:
    listener = listen(LOOPBACK)
    ours = connect(listener.address, timeout=PATIENCE)
    wait_readable(listener)
    theirs = listener.accept()
    listener.close()
    assert theirs is not None
    return ours, theirs


def socket_of(stream: Stream) -> socket.socket:
    assert isinstance(stream, SocketStream)
    return stream._socket


# Addresses -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rest",
    [
        "",
        "host",
        "host:",
        "host:x",
        "host:-1",
        "host:65536",
        "host:1:2",
        "::1:80",
        "[::1]",
        "h:\u0663",
    ],
)
def test_malformed_addresses(rest: str) -> None:
    with pytest.raises(ConfigurationError, match="not of the form tcp://host:port"):
        connect(f"tcp://{rest}", timeout=1.0)
    with pytest.raises(ConfigurationError, match="not of the form tcp://host:port"):
        listen(f"tcp://{rest}")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "[::1]"])
def test_loopback_is_served(host: str) -> None:
    listener = listen(f"tcp://{host}:0")
    prefix, _, port = listener.address.rpartition(":")
    assert prefix == f"tcp://{host}"
    assert int(port) > 0
    connect(listener.address, timeout=PATIENCE).close()
    listener.close()


@pytest.mark.parametrize("host", ["", "0.0.0.0", "[::]"])
def test_other_hosts_are_served_only_where_allowed(host: str) -> None:
    with pytest.raises(ConfigurationError, match=r"without TLS .*listen on 127\.0\.0\.1, or allow"):
        listen(f"tcp://{host}:0")
    listener = listen(f"tcp://{host}:0", allow_plaintext=True)
    port = listener.address.rpartition(":")[2]
    connect(f"tcp://{'[::1]' if '[' in host else '127.0.0.1'}:{port}", timeout=PATIENCE).close()
    listener.close()


def bound_to(listener: Listener) -> tuple[str, str]:
    """Returns the address of a listener's socket, and the host that others are to call; closes."""
    with socket.socket(fileno=os.dup(listener.fileno())) as same:
        found = same.getsockname()[0], listener.address.partition("://")[2].rpartition(":")[0]
    listener.close()
    return found


@pytest.mark.parametrize(
    ("name", "resolved", "bound"),
    [
        ("alder", "127.0.1.1", "0.0.0.0"),  # as Debian's /etc/hosts has it
        ("alder.example.org", "127.0.1.1", "0.0.0.0"),
        ("alder", "::1", "::"),
        ("localhost", "127.0.0.1", "127.0.0.1"),
        ("localhost.localdomain", "127.0.0.1", "127.0.0.1"),
        ("ip6-localhost", "::1", "::1"),
        ("me.localhost", "127.0.0.1", "127.0.0.1"),
        ("127.0.1.1", "127.0.1.1", "127.0.1.1"),
    ],
)
def test_a_machines_name_that_is_loopback_there_is_served_to_other_hosts(
    name: str,
    resolved: str,
    bound: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    family = socket.AF_INET6 if ":" in resolved else socket.AF_INET
    rest = (0, 0, 0) if ":" in resolved else (0,)
    monkeypatch.setattr(tcp, "_lookup", lambda host, port, flags=0: [(family, (resolved, *rest))])
    assert bound_to(tcp.bind(f"{name}:0", "tls", SocketStream)) == (bound, name)
    said = f"{name} is {resolved} on this machine (as Debian's /etc/hosts has it), which other"
    assert (said in caplog.text) == (bound != resolved)
    # No other host may reach it anyway.
    listener = tcp.bind(f"{name}:0", "tcp", SocketStream, allow_plaintext=False)
    assert bound_to(listener) == (resolved, name)


def test_a_host_that_is_not_ours() -> None:
    with pytest.raises(ConfigurationError, match="one of this machine's addresses"):
        listen("tcp://192.0.2.1:0", allow_plaintext=True)


def test_a_host_that_nobody_knows() -> None:
    with pytest.raises(ConnectTimeout, match=r"'no-such-host\.invalid' is not known here"):
        connect("tcp://no-such-host.invalid:80", timeout=5.0)
    with pytest.raises(ConfigurationError, match=r"'no-such-host\.invalid'"):
        listen("tcp://no-such-host.invalid:80")
    with pytest.raises(ConnectTimeout):
        connect(f"tcp://{'x' * 300}:80", timeout=5.0)


def test_a_taken_port_names_its_holder() -> None:
    listener = listen(LOOPBACK)
    with pytest.raises(AddressInUse) as caught:
        listen(listener.address)
    listener.close()
    message = str(caught.value)
    assert f"{listener.address} is taken by process {os.getpid()} (" in message
    assert os.path.basename(sys.executable) in message or "pytest" in message


def test_a_taken_port_whose_holder_cannot_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(kind: str) -> list[object]:
        raise tcp.psutil.AccessDenied

    monkeypatch.setattr(tcp.psutil, "net_connections", denied)
    listener = listen(LOOPBACK)
    with pytest.raises(AddressInUse, match="a process that this user may not see"):
        listen(listener.address)
    listener.close()


# Connecting ------------------------------------------------------------------------------------


def test_a_name_with_several_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first refuses, the second answers."""
    listener = listen(LOOPBACK)
    port = int(listener.address.rpartition(":")[2])
    monkeypatch.setattr(
        tcp,
        "_lookup",
        lambda host, port: [
            (socket.AF_INET, ("127.0.0.2", port)),
            (socket.AF_INET, ("127.0.0.1", port)),
        ],
    )
    stream = connect(f"tcp://two-addresses:{port}", timeout=PATIENCE)
    assert stream.peer == f"tcp://two-addresses:{port}"
    stream.close()
    listener.close()
    with pytest.raises(ConnectionRefused, match="two-addresses"):
        connect(f"tcp://two-addresses:{port}", timeout=PATIENCE)


def test_nobody_answers() -> None:
    """A listener whose queue is full leaves the next ones without an answer."""
    silent = socket.socket()
    silent.bind(("127.0.0.1", 0))
    silent.listen(0)
    address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
    waiting = []
    with pytest.raises(ConnectTimeout, match=rf"cannot reach {address}: no answer in time"):
        for _ in range(5):
            waiting.append(connect(address, timeout=0.2))
    for stream in waiting:
        stream.close()
    silent.close()


@pytest.mark.parametrize(
    "error",
    [
        OSError(113, "No route to host"),
        OSError(101, "Unreachable"),
        OSError(100, "Network is down"),
    ],
)
def test_no_way_to_the_host(error: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost(socket.socket):
        def connect(self, address: object) -> None:
            raise error

    monkeypatch.setattr(tcp.socket, "socket", Lost)
    with pytest.raises(ConnectTimeout, match=f"{error.strerror}; check the host"):
        connect("tcp://192.0.2.1:80", timeout=1.0)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ETIMEDOUT, NetworkLost),
        (errno.EHOSTUNREACH, NetworkLost),
        (errno.ECONNRESET, ConnectionBroken),
    ],
)
def test_a_host_that_has_fallen_silent_has_not_reset_the_connection(
    number: int, kind: type[WireError]
) -> None:
    assert type(explain(OSError(number, "x"), "ps:0")) is kind


def test_what_is_forbidden_is_not_called_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forbidden(socket.socket):
        def connect(self, address: object) -> None:
            raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(tcp.socket, "socket", Forbidden)
    with pytest.raises(WireError, match=r"cannot connect to .*: Operation not") as caught:
        connect("tcp://192.0.2.1:80", timeout=1.0)
    assert not isinstance(caught.value, ConnectTimeout)


def test_too_many_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> socket.socket:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(tcp.socket, "socket", full)
    with pytest.raises(WireError, match="Too many open files"):
        connect("tcp://127.0.0.1:80", timeout=1.0)
    with pytest.raises(WireError, match="Too many open files"):
        listen(LOOPBACK)


def test_a_socket_does_not_connect_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calling a free port of this host can reach the very socket that calls."""

    class Narcissus(socket.socket):
        def connect(self, address: tuple[str, int]) -> None:
            self.bind(address)
            super().connect(address)

    free = listen(LOOPBACK)
    free.close()
    monkeypatch.setattr(tcp.socket, "socket", Narcissus)
    with pytest.raises(ConnectionRefused, match="nothing listens"):
        connect(free.address, timeout=PATIENCE)


# Streams ---------------------------------------------------------------------------------------


def test_the_options_of_both_ends() -> None:
    for stream in connected():
        option = socket_of(stream).getsockopt
        assert option(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert option(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if sys.platform == "linux":
            assert option(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 10_000
            assert option(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < 10
        assert not socket_of(stream).getblocking()
        assert not os.get_inheritable(stream.fileno())
        stream.close()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems give other buffers")
def test_a_usual_payload_fits_into_the_buffers() -> None:
    """318 KB in one call, before anybody reads: where the kernel's limits allow such buffers."""
    ours, theirs = connected()
    granted = socket_of(ours).getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    if granted < 1 << 20:
        pytest.skip(f"net.core.wmem_max allows only {granted} bytes")
    with Connection(ours, CATALOG) as sender:
        assert sender.offer(Note(), [bytes(318_040)])
    theirs.close()


def test_a_reset_is_a_broken_connection() -> None:
    ours, theirs = connected()
    socket_of(theirs).setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    theirs.close()
    wait_readable(ours)
    with pytest.raises(ConnectionBroken, match=f"connection to {ours.peer} broke: "):
        ours.read_into([memoryview(bytearray(1))])
    ours.close()


def test_a_reset_is_seen_by_writers() -> None:
    ours, theirs = connected()
    socket_of(theirs).setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    theirs.close()
    wait_readable(ours)
    with pytest.raises((ConnectionBroken, PeerClosed)):
        ours.write([b"x"])
    ours.close()


def test_a_listener_that_cannot_accept(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(socket.socket):
        def accept(self) -> tuple[socket.socket, object]:
            raise OSError(24, "Too many open files")

    listening = Full()
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    listener = SocketListener(listening, "tcp://127.0.0.1:1", lambda accepted, peer: None)
    with pytest.raises(WireError, match=r"cannot accept: Too many open files"):
        listener.accept()
    listener.close()


def test_a_listener_is_not_inherited() -> None:
    listener = listen(LOOPBACK)
    assert not os.get_inheritable(listener.fileno())
    assert not select.select([listener], [], [], 0)[0]
    listener.close()
