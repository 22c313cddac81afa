"""Whoever comes to a listener without the right to: refused for a reason that tells nothing else.

Each is refused by a service as the coordinator and the servers have it, with TLS and without where
that makes a difference. Nothing has changed on the service then: no handler has heard of anybody,
and a task of the job is served as before.
"""

from __future__ import annotations

import queue
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import msgspec
import pytest

from tests.certificates import authority, certificates
from tests.clocks import VirtualClock
from tests.conformance import PATIENCE, read_until_end, wait_readable, write_all
from tests.wire.serving import CATALOG, JOB, SECRET, Echo, EchoHandler, Running, ask, running
from trireme.certificates import Certificates
from trireme.errors import (
    AuthenticationError,
    ConnectionBroken,
    FrameError,
    PeerClosed,
    ProtocolMismatch,
    WireError,
)
from trireme.wire.connection import Connection
from trireme.wire.handshake import Hello, Identity, authenticate
from trireme.wire.message import HANDSHAKE_LIMITS, PROTOCOL_VERSION, pack_header
from trireme.wire.refusals import ServiceLimits
from trireme.wire.transport import Stream, connect, listen

SERVED = ("ps:0", "coordinator:0")


class Door:
    """A service at loopback, with TLS or without, and those who come to it."""

    def __init__(self, scheme: str, run: Running, handler: EchoHandler) -> None:
        self.scheme, self.run, self.handler = scheme, run, handler
        self.good = self.enter("worker:0")
        assert handler.links.get(timeout=PATIENCE).identity.task == "worker:0"

    @property
    def address(self) -> str:
        return self.run.service.address

    def enter(
        self,
        task: str,
        *,
        secret: bytes = SECRET,
        job: str = JOB,
        server: str = "ps:0",
        certificate: Certificates | None = None,
    ) -> Connection:
        """Comes as a task, with its own certificate where there are any."""
        own = (certificate or certificates(task)) if self.scheme == "tls" else None
        connection = Connection(connect(self.address, timeout=PATIENCE, certificates=own), CATALOG)
        authenticate(connection, Identity(job, task), secret, server=server, timeout=PATIENCE)
        return connection

    def plain(self) -> Stream:
        """Comes in plain text, whatever is spoken here."""
        return connect(self.address.replace("tls", "tcp"), timeout=PATIENCE)

    def nothing_has_changed(self) -> None:
        ask(self.good, "still served", b"payload")
        with pytest.raises(queue.Empty):
            self.handler.links.get_nowait()
        with pytest.raises(queue.Empty):
            self.handler.closings.get_nowait()


def door(scheme: str) -> Iterator[Door]:
    handler = EchoHandler()
    own = certificates("ps:0") if scheme == "tls" else None
    listener = listen(f"{scheme}://127.0.0.1:0", certificates=own)
    with running(handler, listener=listener, serves=SERVED) as run:
        made = Door(scheme, run, handler)
        yield made
        made.nothing_has_changed()
        made.good.close()


@pytest.fixture(params=["tcp", "tls"])
def either(request: pytest.FixtureRequest) -> Iterator[Door]:
    yield from door(request.param)


@pytest.fixture
def plain() -> Iterator[Door]:
    yield from door("tcp")


@pytest.fixture
def tls() -> Iterator[Door]:
    yield from door("tls")


# With TLS and without ----------------------------------------------------------------------------


def test_no_secret(either: Door) -> None:
    with pytest.raises(AuthenticationError, match="this task's secret is not that of job"):
        either.enter("worker:1", secret=b"")


def test_a_wrong_secret(either: Door) -> None:
    with pytest.raises(AuthenticationError, match="this task's secret is not that of job"):
        either.enter("worker:1", secret=b"another secret")


def test_another_job(either: Door) -> None:
    with pytest.raises(AuthenticationError, match="serves another job than job-2"):
        either.enter("worker:1", job="job-2")


def test_another_server(either: Door) -> None:
    """Without TLS the server says no; with it, the client reads that in the certificate."""
    with pytest.raises(AuthenticationError, match=r"ps:1"):
        either.enter("worker:1", server="ps:1")


@pytest.mark.parametrize("named", ["worker:1", "worker:1\n\x1b[2J"])
def test_a_stranger_writes_no_lines_and_no_escape_sequences_into_the_log(
    plain: Door, caplog: pytest.LogCaptureFixture, named: str
) -> None:
    job = "job\nps:0 ends: the job is finished\n\x1b]0;title\x07\u202e"
    hello = msgspec.msgpack.encode(Hello(job, "", named, 0, bytes(32), "ps:0", plain.address))
    stranger = plain.plain()
    write_all(stranger, pack_header(Hello.kind, len(hello), 0, 0) + hello)
    read_until_end(stranger)
    plain.run.turn()
    (line,) = [line for line in caplog.messages if "an unauthenticated peer" in line]
    assert line.isprintable()
    assert ("is of another job" if named == "worker:1" else "is not the name of a task") in line


def old_frame(door: Door, version: int) -> bytes:
    """Says hello in another version of the protocol; returns what is answered."""
    hello = Hello(JOB, "", "worker:1", 0, bytes(32), "ps:0", door.address)
    metadata = msgspec.msgpack.encode(hello)
    frame = bytearray(pack_header(Hello.kind, len(metadata), 0, 0) + metadata)
    assert frame[4] == PROTOCOL_VERSION
    frame[4] = version
    own = certificates("worker:1") if door.scheme == "tls" else None
    stream = connect(door.address, timeout=PATIENCE, certificates=own)
    write_all(stream, bytes(frame))
    answer = read_until_end(stream)
    stream.close()
    return answer


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1])
def test_another_version_of_the_protocol(either: Door, version: int) -> None:
    answer = old_frame(either, version)
    assert answer.startswith(b"TRIR" + bytes([PROTOCOL_VERSION]))  # which the other side names
    assert answer.endswith(b"version")
    assert len(answer) < 48


def test_a_stranger_is_answered_nothing(either: Door) -> None:
    stream = either.plain()
    write_all(stream, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    answer = read_until_end(stream)
    stream.close()
    assert answer in (b"", b"\x15\x03\x03\x00\x02\x02\x46")  # TLS's own word for a wrong version


def test_a_message_before_the_handshake(either: Door) -> None:
    own = certificates("worker:1") if either.scheme == "tls" else None
    connection = Connection(connect(either.address, timeout=PATIENCE, certificates=own), CATALOG)
    connection.send(Echo("let me in"), timeout=PATIENCE)
    with pytest.raises((PeerClosed, ConnectionBroken)):
        connection.receive(timeout=PATIENCE)
    connection.close()


def test_more_than_a_stranger_may_send(either: Door) -> None:
    own = certificates("worker:1") if either.scheme == "tls" else None
    stream = connect(either.address, timeout=PATIENCE, certificates=own)
    write_all(stream, pack_header(Hello.kind, HANDSHAKE_LIMITS.metadata + 1, 0, 0))
    assert read_until_end(stream) == b""
    stream.close()


# Without TLS -------------------------------------------------------------------------------------


def test_tls_to_a_listener_in_plain_text(plain: Door) -> None:
    address = plain.address.replace("tcp", "tls")
    with pytest.raises(ProtocolMismatch, match="speaks in plain text, and this task only by TLS"):
        connect(address, timeout=PATIENCE, certificates=certificates("worker:1"))


# With TLS ----------------------------------------------------------------------------------------


def test_plain_text_to_a_listener_with_tls(tls: Door) -> None:
    connection = Connection(tls.plain(), CATALOG)
    with pytest.raises(ProtocolMismatch, match="speaks TLS only, and this task in plain text"):
        authenticate(connection, Identity(JOB, "worker:1"), SECRET, server="ps:0")


def test_a_worker_that_claims_the_index_of_another(tls: Door) -> None:
    for claimed in ("worker:2", "ps:0", "coordinator:0", "observer:0"):
        with pytest.raises(AuthenticationError, match="certificate of this task is for another"):
            tls.enter(claimed, certificate=certificates("worker:1"))


def test_a_worker_that_serves_in_a_servers_place() -> None:
    """It has the secret, and a good certificate of its own: the worker that calls is told."""
    with (
        door_of("worker:1") as enter,
        pytest.raises(AuthenticationError, match="has a certificate for worker:1, and ps:0"),
    ):
        enter()


@contextmanager
def door_of(task: str) -> Iterator[Callable[[], object]]:
    handler = EchoHandler()
    listener = listen("tls://127.0.0.1:0", certificates=certificates(task))
    with running(handler, listener=listener) as run:

        def enter() -> None:
            stream = connect(
                run.service.address, timeout=PATIENCE, certificates=certificates("worker:0")
            )
            authenticate(
                Connection(stream, CATALOG), Identity(JOB, "worker:0"), SECRET, server="ps:0"
            )

        yield enter
        with pytest.raises(queue.Empty):
            handler.links.get_nowait()


def test_the_certificate_of_another_authority(tls: Door) -> None:
    mixed = authority("theirs").issue("worker:1").rpartition("-----BEGIN")[0]
    with pytest.raises(AuthenticationError, match="it is of another job's authority"):
        tls.enter("worker:1", certificate=Certificates(mixed + authority().certificate))


def test_an_expired_certificate(tls: Door) -> None:
    expired = Certificates(authority().issue("worker:1", days=-0.01))
    with pytest.raises(AuthenticationError, match="it has expired, by the clock there"):
        tls.enter("worker:1", certificate=expired)


def test_no_certificate(tls: Door) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    host, _, port = tls.address.removeprefix("tls://").rpartition(":")
    with (
        socket.create_connection((host, int(port)), PATIENCE) as bare,
        pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"),
    ):
        context.wrap_socket(bare).recv(1)


def test_a_certificate_is_no_secret(tls: Door) -> None:
    """Whoever has stolen a certificate alone does not get in, nor learns more than that."""
    with pytest.raises(AuthenticationError, match="secret") as caught:
        tls.enter("worker:1", secret=b"")
    assert "certificate" not in str(caught.value)


# Slowly ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["tcp", "tls"])
def test_a_handshake_that_comes_byte_by_byte_ends_in_time(scheme: str) -> None:
    """The deadline is of the whole handshake, and no byte puts it off."""
    clock, handler = VirtualClock(), EchoHandler()
    own = certificates("ps:0") if scheme == "tls" else None
    listener = listen(f"{scheme}://127.0.0.1:0", certificates=own)
    limits = ServiceLimits(handshake_seconds=10.0)
    with running(handler, listener=listener, clock=clock, limits=limits) as run:
        address = run.service.address.replace("tls", "tcp")
        slow = connect(address, timeout=PATIENCE)
        beginning = b"\x16\x03\x01\x02\x00\x01\x00\x01" if scheme == "tls" else b"TRIR\x01\x01\0\0"
        for byte in beginning:
            write_all(slow, bytes([byte]))
            run.turn()
            clock.advance(1.2)
        run.turn()
        clock.advance(1.0)
        wait_readable(slow)
        with pytest.raises((PeerClosed, ConnectionBroken)):
            while True:
                wait_readable(slow)
                slow.read_into([memoryview(bytearray(64))])
        slow.close()
        run.turn()  # the refusal is counted after the connection is closed
        assert run.service.refusals.count == 1
    assert handler.links.empty()


@pytest.mark.parametrize("scheme", ["tcp", "tls"])
def test_many_who_say_nothing_keep_nobody_out(scheme: str) -> None:
    handler = EchoHandler()
    own = certificates("ps:0") if scheme == "tls" else None
    listener = listen(f"{scheme}://127.0.0.1:0", certificates=own)
    limits = ServiceLimits(unauthenticated=8)
    with running(handler, listener=listener, limits=limits) as run:
        address = run.service.address.replace("tls", "tcp")
        silent = [connect(address, timeout=PATIENCE) for _ in range(40)]
        mine = certificates("worker:0") if scheme == "tls" else None
        connection = Connection(
            connect(run.service.address, timeout=PATIENCE, certificates=mine), CATALOG
        )
        authenticate(connection, Identity(JOB, "worker:0"), SECRET, server="ps:0")
        ask(connection, "served")
        run.turn()
        assert len(run.service._links) <= limits.unauthenticated + 1
        for stream in silent:
            with suppress(WireError):
                stream.close()
        connection.close()


# Bytes -------------------------------------------------------------------------------------------


def test_a_record_cut_anywhere_is_never_a_message() -> None:
    """Somebody between cuts what a worker sends; what has come whole before that counts."""
    for cut in (1, 5, 21, 40, 54):
        with cut_records(cut) as heard:
            assert heard == [Echo("whole")]


@contextmanager
def cut_records(cut: int) -> Iterator[list[Echo]]:
    heard: list[Echo] = []

    class Hears(EchoHandler):
        def received(self, link: object, incoming: object) -> None:
            heard.append(incoming.message)  # type: ignore[attr-defined]

    handler = Hears()
    listener = listen("tls://127.0.0.1:0", certificates=certificates("ps:0"))
    with running(handler, listener=listener) as run:
        stream = connect(
            run.service.address, timeout=PATIENCE, certificates=certificates("worker:0")
        )
        connection = Connection(stream, CATALOG)
        authenticate(connection, Identity(JOB, "worker:0"), SECRET, server="ps:0")
        connection.send(Echo("whole"), timeout=PATIENCE)
        metadata = CATALOG.encode(Echo("cut"))
        frame = pack_header(Echo.kind, len(metadata), 0, 0) + metadata
        stream._tls.write(frame)  # type: ignore[attr-defined]
        sealed = stream._outgoing.read()  # type: ignore[attr-defined]
        assert cut < len(sealed)
        stream._socket.sendall(sealed[:cut])  # type: ignore[attr-defined]
        stream._socket.close()  # type: ignore[attr-defined]
        _, error = handler.closings.get(timeout=PATIENCE)
        assert isinstance(error, (ConnectionBroken, FrameError))
        yield heard
