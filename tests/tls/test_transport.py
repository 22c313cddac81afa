from __future__ import annotations

import select
import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta

import pytest

from tests.certificates import authority, certificates
from tests.conformance import (
    CATALOG,
    PATIENCE,
    Note,
    in_thread,
    pattern,
    read_exactly,
    wait_readable,
    write_all,
)
from trireme.certificates import Certificates
from trireme.errors import (
    AuthenticationError,
    ConfigurationError,
    ConnectionBroken,
    ConnectTimeout,
    FrameError,
    PeerClosed,
    WireError,
)
from trireme.tls import authority as authority_module
from trireme.tls import transport as tls
from trireme.tls.transport import TlsStream
from trireme.wire.connection import Connection
from trireme.wire.transport import Listener, Stream, connect, listen
from trireme.wire.transports.socket_stream import SocketStream

ADDRESS = "tls://127.0.0.1:0"


def accepted(listener: Listener) -> Stream:
    wait_readable(listener)
    stream = listener.accept()
    assert stream is not None
    return stream


def drive(stream: Stream, until: Callable[[], bool]) -> WireError | None:
    """Has the accepting side go on with its handshake; returns the error that ends it."""
    while not until():
        select.select([stream], [], [], 0.01)
        try:
            assert stream.read_into([memoryview(bytearray(1))]) == 0
        except WireError as error:
            return error
    return None


def meet(
    client: Certificates, server: Certificates
) -> tuple[Future[Stream], Stream, WireError | None]:
    """Has both shake hands; returns what became of the client, the server's end, and its error."""
    listener = listen(ADDRESS, certificates=server)
    with in_thread(connect, listener.address, timeout=PATIENCE, certificates=client) as connecting:
        theirs = accepted(listener)
        error = drive(theirs, lambda: connecting.done() and theirs.certified != ())
        if error is not None:
            theirs.close()
    listener.close()
    return connecting, theirs, error


@contextmanager
def connected() -> Iterator[tuple[TlsStream, TlsStream]]:
    connecting, theirs, error = meet(certificates("worker:0"), certificates("ps:0"))
    ours = connecting.result()
    assert error is None
    assert isinstance(ours, TlsStream) and isinstance(theirs, TlsStream)
    yield ours, theirs
    ours.close()
    theirs.close()


# Who is there ------------------------------------------------------------------------------------


def test_each_side_knows_whose_certificate_the_other_has() -> None:
    with connected() as (ours, theirs):
        assert ours.certified == ("ps:0", "coordinator:0")
        assert theirs.certified == ("worker:0",)
        assert ours.called == theirs.called
        assert ours._tls.version() == "TLSv1.3"


def refused(client: Certificates, server: Certificates) -> tuple[WireError, WireError | None]:
    """Returns what the client is told, on connecting or on its first words, and the server."""
    connecting, _, error = meet(client, server)
    with pytest.raises(WireError) as caught:
        stream = connecting.result()
        stream.write([b"hello"])
        while True:
            wait_readable(stream)
            stream.read_into([memoryview(bytearray(1))])
    return caught.value, error


def test_a_server_of_another_authority() -> None:
    told, noticed = refused(certificates("worker:0"), certificates("ps:0", "theirs"))
    assert isinstance(told, AuthenticationError)
    assert "is not of this job's authority" in str(told)
    assert isinstance(noticed, AuthenticationError)
    assert "refused this task's certificate" in str(noticed)


def test_a_client_of_another_authority() -> None:
    # It trusts the server's authority and has a certificate of its own.
    mixed = Certificates(
        authority("theirs").issue("worker:0").rpartition("-----BEGIN")[0] + authority().certificate
    )
    told, noticed = refused(mixed, certificates("ps:0"))
    assert isinstance(told, AuthenticationError)
    assert "refused this task's certificate: it is of another job's authority" in str(told)
    assert isinstance(noticed, AuthenticationError)
    assert "is not of this job's authority" in str(noticed)


def test_an_expired_server() -> None:
    expired = Certificates(authority().issue("ps:0", days=-0.01))
    told, _ = refused(certificates("worker:0"), expired)
    assert isinstance(told, AuthenticationError)
    assert "has expired: issue a new one" in str(told)


def test_an_expired_client() -> None:
    expired = Certificates(authority().issue("worker:0", days=-0.01))
    told, noticed = refused(expired, certificates("ps:0"))
    assert isinstance(told, AuthenticationError)
    assert "refused this task's certificate: it has expired, by the clock there" in str(told)
    assert isinstance(noticed, AuthenticationError)


def test_a_certificate_of_the_future(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = authority()  # of now: other tests share it
    with monkeypatch.context() as later:
        later.setattr(authority_module, "_now", lambda: datetime.now(UTC) + timedelta(days=2))
        early = Certificates(ours.issue("ps:0"))
    told, _ = refused(certificates("worker:0"), early)
    assert isinstance(told, AuthenticationError)
    assert "is not valid yet: check the clocks" in str(told)


def test_a_task_cannot_make_certificates() -> None:
    """What `worker:0` signs with its own key is nobody's, though its own is good."""
    own = authority().issue("worker:0")
    key, _, rest = own.partition("-----BEGIN CERTIFICATE-----")
    first = "-----BEGIN CERTIFICATE-----" + rest.partition("-----BEGIN CERTIFICATE-----")[0]
    forged = authority_module.JobAuthority(first, key).issue("ps:0")
    told, _ = refused(
        certificates("worker:1"), Certificates(forged.rpartition("-----BEGIN")[0] + first)
    )
    assert isinstance(told, (AuthenticationError, FrameError))


# Who speaks something else -----------------------------------------------------------------------


def foreign(options: Callable[[ssl.SSLContext], object]) -> tuple[str, WireError | None]:
    """Connects by the `ssl` module itself; returns its error and the server's."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    options(context)
    listener = listen(ADDRESS, certificates=certificates("ps:0"))
    port = int(listener.address.rpartition(":")[2])

    def call() -> str:
        with socket.create_connection(("127.0.0.1", port), PATIENCE) as bare:
            try:
                context.wrap_socket(bare).recv(1)
            except OSError as error:
                return str(error)
        return ""

    with in_thread(call) as calling:
        theirs = accepted(listener)
        error = drive(theirs, calling.done)
        theirs.close()
        listener.close()
        return calling.result(), error


def test_a_client_without_a_certificate() -> None:
    told, noticed = foreign(lambda context: None)
    assert "CERTIFICATE_REQUIRED" in told
    assert isinstance(noticed, AuthenticationError)
    assert "has no certificate" in str(noticed)


def test_an_older_tls() -> None:
    def old(context: ssl.SSLContext) -> None:
        context.maximum_version = ssl.TLSVersion.TLSv1_2

    told, noticed = foreign(old)
    assert "PROTOCOL_VERSION" in told
    assert isinstance(noticed, AuthenticationError)
    assert "an older TLS than 1.3" in str(noticed)


def test_plain_text_to_a_listener_with_tls() -> None:
    listener = listen(ADDRESS, certificates=certificates("ps:0"))
    ours = Connection(connect(listener.address.replace("tls", "tcp"), timeout=PATIENCE), CATALOG)
    theirs = accepted(listener)
    ours.send(Note("in the clear"), timeout=PATIENCE)
    error = drive(theirs, lambda: False)
    assert isinstance(error, FrameError)
    assert "speaks in plain text, and this task only by TLS" in str(error)
    theirs.close()
    with pytest.raises(FrameError, match="speaks TLS only, and this task in plain text"):
        ours.receive(timeout=PATIENCE)
    listener.close()
    ours.close()


def test_tls_to_a_listener_without_it() -> None:
    listener = listen("tcp://127.0.0.1:0")
    address = listener.address.replace("tcp", "tls")
    own = certificates("worker:0")
    with in_thread(connect, address, timeout=PATIENCE, certificates=own) as connecting:
        theirs = Connection(accepted(listener), CATALOG)
        with pytest.raises(FrameError, match="the peer speaks TLS, and this side plain text"):
            theirs.receive(timeout=PATIENCE)
        theirs.offer(Note("what a plain listener answers"))
        theirs.close()
        with pytest.raises(FrameError, match="speaks in plain text, and this task only by TLS"):
            connecting.result(PATIENCE)
    listener.close()


def test_a_listener_that_hangs_up() -> None:
    listener = listen("tcp://127.0.0.1:0")
    address = listener.address.replace("tcp", "tls")
    own = certificates("worker:0")
    with in_thread(connect, address, timeout=PATIENCE, certificates=own) as connecting:
        theirs = accepted(listener)
        read_exactly(theirs, 1)
        while theirs.read_into([memoryview(bytearray(1 << 16))]):
            pass
        theirs.close()
        with pytest.raises((ConnectionBroken, PeerClosed), match="during the TLS handshake"):
            connecting.result(PATIENCE)
    listener.close()


def test_a_listener_that_says_nothing() -> None:
    silent = listen("tcp://127.0.0.1:0")
    address = silent.address.replace("tcp", "tls")
    with pytest.raises(ConnectTimeout, match=r"did not complete the TLS handshake within 0\.1 s"):
        connect(address, timeout=0.1, certificates=certificates("worker:0"))
    silent.close()


@pytest.mark.parametrize("seed", range(20))
def test_what_is_no_handshake_is_an_error_of_ours(seed: int) -> None:
    listener = listen(ADDRESS, certificates=certificates("ps:0"))
    bare = connect(listener.address.replace("tls", "tcp"), timeout=PATIENCE)
    theirs = accepted(listener)
    head = b"\x16\x03\x01" if seed % 2 else b""
    write_all(bare, head + pattern(3000 + seed, seed))
    bare.close()
    error = drive(theirs, lambda: False)
    assert isinstance(error, WireError)
    theirs.close()
    listener.close()


# What is between ----------------------------------------------------------------------------------


def raw(stream: TlsStream) -> socket.socket:
    return stream._socket


def test_an_end_that_was_not_announced_is_a_cut() -> None:
    """Whoever is between can end a connection of TCP, and must not be taken for the peer."""
    with connected() as (ours, theirs):
        write_all(ours, b"last words")
        raw(ours).shutdown(socket.SHUT_WR)
        assert read_exactly(theirs, 10) == b"last words"
        for _ in range(2):
            with pytest.raises(ConnectionBroken, match="its end did not say that it is"):
                theirs.read_into([memoryview(bytearray(1))])


def test_a_reset_is_a_broken_connection() -> None:
    with connected() as (ours, theirs):
        raw(theirs).setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raw(theirs).close()
        wait_readable(ours)
        with pytest.raises(ConnectionBroken, match="broke: "):
            ours.read_into([memoryview(bytearray(1))])


@pytest.mark.parametrize("change", ["flip", "insert", "repeat", "drop"])
def test_what_was_changed_on_the_way_is_never_read(change: str) -> None:
    with connected() as (ours, theirs):
        ours._tls.write(b"a" * 100)
        first = ours._outgoing.read()
        ours._tls.write(b"b" * 100)
        second = ours._outgoing.read()
        sent = {
            "flip": first[:50] + bytes([first[50] ^ 1]) + first[51:],
            "insert": b"\x17\x03\x03\x00\x20" + bytes(32) + first,
            "repeat": first + first,
            "drop": second,
        }[change]
        raw(ours).sendall(sent)
        wait_readable(theirs)
        buffer = memoryview(bytearray(300))
        came = 0
        with pytest.raises(ConnectionBroken, match="what arrived is not what was sent"):
            while True:
                if not theirs.pending:
                    wait_readable(theirs)
                came += theirs.read_into([buffer[came:]])
        assert bytes(buffer[:came]) == (b"a" * 100 if change == "repeat" else b"")


# Bytes --------------------------------------------------------------------------------------------


def test_what_was_decrypted_and_does_not_fit_is_pending() -> None:
    with connected() as (ours, theirs):
        write_all(ours, pattern(1000))
        wait_readable(theirs)
        buffer = memoryview(bytearray(400))
        assert theirs.read_into([buffer]) == 400 and theirs.pending
        assert not select.select([theirs], [], [], 0)[0]  # the descriptor shows nothing
        assert theirs.read_into([buffer]) == 400 and theirs.pending
        assert theirs.read_into([buffer]) == 200 and not theirs.pending
        assert theirs.read_into([buffer]) == 0


def test_messages_that_came_together_are_all_received() -> None:
    payload = pattern(100)
    with connected() as (ours, theirs):
        ours.write([b""] + [b"x" * 20] * 10)
        sender, receiver = Connection(ours, CATALOG), Connection(theirs, CATALOG)
        assert read_exactly(theirs, 200) == b"x" * 200
        for number in range(200):
            sender.offer(Note(f"{number}"), [payload])
        for number in range(200):
            assert receiver.receive(timeout=PATIENCE).message == Note(f"{number}")


def test_small_buffers_share_a_record_and_large_ones_are_not_copied() -> None:
    large = pattern(3 * tls.RECORD_BYTES)
    pieces = list(tls._records([b"head", b"", memoryview(b"er"), large, b"tail"]))
    assert b"".join(pieces) == b"header" + large + b"tail"
    assert [len(piece) for piece in pieces][:3] == [tls.RECORD_BYTES] * 3
    assert isinstance(pieces[1], memoryview) and pieces[1].obj is large
    assert max(len(piece) for piece in pieces) <= tls.RECORD_BYTES


def test_nothing_comes_of_its_own_accord_after_the_handshake() -> None:
    """No session tickets: a connection that is readable has something to say."""
    with connected() as (ours, theirs):
        assert not select.select([ours, theirs], [], [], 0.05)[0]


def test_keys_are_not_used_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "KEY_BYTES", 1000)
    with connected() as (ours, theirs):
        write_all(ours, bytes(900))
        assert ours.write([bytes(200)]) == 200
        with pytest.raises(ConnectionBroken, match="another one is made"):
            ours.write([b"more"])
        assert read_exactly(theirs, 1100) == bytes(1100)  # what was taken is delivered


def test_a_closed_stream_holds_nothing() -> None:
    with connected() as (ours, _):
        while ours.write([bytes(1 << 20)]):
            pass
        assert ours.unsent
        ours.close()
        assert ours.unsent == 0


def test_an_unused_accepted_stream_writes_nothing() -> None:
    """Nothing can be said to whom has not shaken hands."""
    listener = listen(ADDRESS, certificates=certificates("ps:0"))
    bare = connect(listener.address.replace("tls", "tcp"), timeout=PATIENCE)
    theirs = accepted(listener)
    assert theirs.write([b"secret"]) == 0
    theirs.close()
    with suppress(PeerClosed, ConnectionBroken):
        wait_readable(bare)
        assert bare.read_into([memoryview(bytearray(8))]) == 0
    assert isinstance(bare, SocketStream)
    bare.close()
    listener.close()


# Certificates -------------------------------------------------------------------------------------


def test_a_text_that_is_no_certificate() -> None:
    for text in ("", "nonsense", authority().certificate):
        with pytest.raises(ConfigurationError, match="cannot be used"):
            listen(ADDRESS, certificates=Certificates(text))


def test_the_key_is_not_shown() -> None:
    own = certificates("worker:0")
    assert "PRIVATE" not in repr(own) + str(own) + repr(authority())
