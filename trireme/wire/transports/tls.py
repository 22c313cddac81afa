"""The `tls://host:port` transport: TLS 1.3 over TCP, both sides with certificates of one authority.

OpenSSL works on memory here and never sees the socket. A read takes from the socket what is there,
up to 256 KB, and decrypts it into the caller's buffers. A write encrypts from the caller's buffers
and hands the system 256 KB at a time. What the system does not take then is kept: see
`Stream.unsent`.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from select import POLLIN, POLLOUT, poll
from typing import TYPE_CHECKING

from trireme.certificates import Certificates, names
from trireme.errors import (
    AuthenticationError,
    ConnectionBroken,
    ConnectionClosed,
    ConnectTimeout,
    FrameError,
    PeerClosed,
    ProtocolMismatch,
    WireError,
)
from trireme.wire.transport import Listener, Stream, Transport
from trireme.wire.transports.socket_stream import explain
from trireme.wire.transports.tcp import bind, dial

if TYPE_CHECKING:
    from typing_extensions import Buffer

RECORD_BYTES = 1 << 14  # the most that one record of TLS holds

KEY_BYTES = 1 << 38
"""How many bytes the keys of one connection protect, in each direction. By RFC 8446, section 5.5,
AES-GCM stays safe for 2^24.5 full records, which is 388 GB. Then a new connection is made."""

_CHUNK = 1 << 18  # bytes from and to the system in one call
_AT_ONCE = 1 << 22  # bytes that one read or write may process, so that other peers have their turn
_HANDSHAKE_READS = 16  # how often a handshake reads before other peers have their turn

_WRONG_VERSION = b"\x15\x03\x03\x00\x02\x02\x46"  # the alert protocol_version

_UNVERIFIED = {  # by X509_V_ERR_NOT_YET_VALID, X509_V_ERR_HAS_EXPIRED
    9: "is not valid yet: check the clocks of both hosts",
    10: "has expired: issue a new one with `trireme certs issue`, and check the clocks",
}
_VERDICTS = {
    "UNKNOWN_CA": "it is of another job's authority",
    "CERTIFICATE_EXPIRED": "it has expired, by the clock there",
    "CERTIFICATE_REQUIRED": "it is missing",
}


def connect(rest: str, *, timeout: float, certificates: Certificates | None) -> Stream:
    """Connects to `host:port` and shakes hands; see `trireme.wire.transport.connect`.

    Raises:
        AuthenticationError: the peer's certificate is of another authority, has expired, or names
            other hosts than the one that was called.
        FrameError: the peer does not speak TLS.
    """
    assert certificates is not None  # checked by `trireme.wire.transport.connect`
    deadline = time.monotonic() + timeout
    connected, called = dial(rest, timeout, "tls")
    stream = TlsStream(
        connected, f"tls://{rest}", called, context=certificates.client, server_side=False
    )
    try:
        while not stream.shake_hands():
            _wait(stream, deadline, timeout)
        _check_host(stream, rest)
    except WireError:
        stream.close()
        raise
    return stream


def _wait(stream: TlsStream, deadline: float, timeout: float) -> None:
    poller = poll()
    poller.register(stream, POLLIN | (POLLOUT if stream.unsent else 0))
    if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise ConnectTimeout(
            f"{stream.peer} did not complete the TLS handshake within {timeout:g} s: the process "
            "there hangs, or does not speak TLS"
        )


def _check_host(stream: TlsStream, rest: str) -> None:
    host = rest.rpartition(":")[0].strip("[]").lower()
    called = stream.called.removeprefix("tls://").rpartition(":")[0].strip("[]")
    if stream.hosts and not {host, called} & {name.lower() for name in stream.hosts}:
        raise AuthenticationError(
            f"the certificate of {stream.peer} is for {' and '.join(stream.hosts)}, and not for "
            f"{host}: call it by that name, or issue one with --host {host}"
        )


def listen(
    rest: str, *, allow_plaintext: bool = False, certificates: Certificates | None
) -> Listener:
    """Listens at `host:port`; see `trireme.wire.transport.listen`."""
    assert certificates is not None  # checked by `trireme.wire.transport.listen`
    context = certificates.server
    return bind(rest, "tls", partial(TlsStream, context=context, server_side=True))


class TlsStream(Stream):
    """A connected socket, which this object owns from now on, under TLS.

    The handshake of the accepting side is driven by its reads. Before it is complete nothing can be
    written. `hosts` are those that the peer's certificate names, once the handshake is complete.
    """

    def __init__(
        self,
        connected: socket.socket,
        peer: str,
        called: str,
        *,
        context: ssl.SSLContext,
        server_side: bool,
    ) -> None:
        connected.setblocking(False)
        self.peer = peer
        self.called = called
        self.certified = ()
        self.hosts: tuple[str, ...] = ()
        self.pending = False
        self._socket = connected
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._established = False
        # Until the peer has a certificate of ours, it makes us keep little.
        self._space = memoryview(bytearray(RECORD_BYTES))
        self._sealed = memoryview(b"")  # ciphertext that the system has not taken yet
        self._bytes_left = {"read": KEY_BYTES, "written": KEY_BYTES}
        self._failure: WireError | None = None

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def unsent(self) -> int:
        return len(self._sealed)

    # The handshake -------------------------------------------------------------------------------

    def shake_hands(self) -> bool:
        """Goes on with the handshake and never blocks; returns whether it is complete.

        Raises:
            AuthenticationError: one side refuses the other's certificate.
            FrameError: the peer does not speak TLS.
            PeerClosed, ConnectionBroken: the connection was lost.
        """
        self._check()
        for _ in range(_HANDSHAKE_READS):
            if self._established:
                break
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._seal()
                if not self._receive():
                    return False
            except ssl.SSLError as error:
                failure = self._fail(_explain_handshake(error, self.peer))
                if isinstance(failure, ProtocolMismatch):
                    self._sealed = memoryview(_WRONG_VERSION)  # which OpenSSL does not say
                with suppress(WireError):
                    self._seal()  # tells the peer why
                raise failure from error
            else:
                self._established = True
                self.certified, self.hosts = names(self._tls.getpeercert() or {})
                self._space = memoryview(bytearray(_CHUNK))
                self._seal()
        return self._established

    # Reading -------------------------------------------------------------------------------------

    def read_into(self, buffers: Sequence[memoryview]) -> int:
        self.pending = False
        self._check()
        if not self._established and not self.shake_hands():
            return 0
        total = 0
        try:
            for view in buffers:
                total += (count := self._fill(view, _AT_ONCE - total))
                if count < len(view):
                    break
            else:
                self.pending = bool(self._tls.pending() or self._incoming.pending)
        except WireError as error:
            self._fail(error)
            if not total:
                raise
        self._spend("read", total)
        self.pending = self.pending or self._failure is not None  # the next read raises it
        return total

    def _fill(self, view: memoryview, most: int) -> int:
        """Decrypts into a view; returns how many bytes there were, up to about `most`."""
        done, size = 0, len(view)
        while done < size:
            try:
                count: int = self._tls.read(size - done, view[done:])  # type: ignore[assignment]
            except ssl.SSLWantReadError:
                if done >= most or not self._receive():
                    break
                continue
            except ssl.SSLError as error:
                failure = _explain(error, self.peer)
            else:
                if count:
                    done += count
                    continue
                failure = PeerClosed(f"{self.peer} closed the connection")
            if done:
                self._failure = failure
                break
            raise failure
        return done

    def _receive(self) -> bool:
        """Takes what the system has received; returns whether there was anything."""
        try:
            count = self._socket.recv_into(self._space)
        except BlockingIOError:
            return False
        except OSError as error:
            raise explain(error, self.peer) from error
        if count:
            self._incoming.write(self._space[:count])
        else:
            self._incoming.write_eof()
        return True

    # Writing -------------------------------------------------------------------------------------

    def write(self, buffers: Sequence[Buffer]) -> int:
        self._check()
        if not self._established or not self.flush():
            return 0
        total = 0
        for record in _records(buffers):
            total += self._tls.write(record)
            if self._outgoing.pending >= _CHUNK and (not self._seal() or total >= _AT_ONCE):
                break
        self._seal()
        self._spend("written", total)
        return total

    def flush(self) -> bool:
        while self._sealed:
            try:
                count = self._socket.send(self._sealed)
            except BlockingIOError:
                return False
            except OSError as error:
                raise explain(error, self.peer) from error
            self._sealed = self._sealed[count:]
        return True

    def _seal(self) -> bool:
        """Sends what was encrypted; returns whether the system has taken all of it."""
        if self._outgoing.pending:
            more = self._outgoing.read()
            self._sealed = memoryview(bytes(self._sealed) + more if self._sealed else more)
        return self.flush()

    # The end -------------------------------------------------------------------------------------

    def close(self) -> None:
        if self._socket.fileno() < 0:
            return
        if self._established and self._failure is None:
            with suppress(ssl.SSLError):  # the peer has not answered, and need not
                self._tls.unwrap()
            with suppress(WireError):
                self._seal()  # says that this is the end: an end without it is a cut
        self._sealed = memoryview(b"")
        self._socket.close()

    def _check(self) -> None:
        if self._socket.fileno() < 0:
            raise ConnectionClosed(f"the connection to {self.peer} was closed by this side")
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))

    def _fail(self, failure: WireError) -> WireError:
        self._failure = failure
        return failure

    def _spend(self, what: str, count: int) -> None:
        self._bytes_left[what] -= count
        if self._bytes_left[what] < 0 and self._failure is None:
            self._failure = ConnectionBroken(
                f"the keys of the connection to {self.peer} have protected {KEY_BYTES >> 30} GB: "
                "another one is made, with others"
            )


def _records(buffers: Sequence[Buffer]) -> Iterator[Buffer]:
    """Yields the bytes of the buffers in pieces of one record. Only small buffers are copied."""
    parts: list[memoryview] = []
    size = 0
    for buffer in buffers:
        view = memoryview(buffer)
        while view:
            piece = view[: RECORD_BYTES - size]
            view = view[len(piece) :]
            if len(piece) == RECORD_BYTES:
                yield piece
                continue
            parts.append(piece)
            size += len(piece)
            if size == RECORD_BYTES:
                yield b"".join(parts)
                parts, size = [], 0
    if parts:
        yield b"".join(parts)


def _explain(error: ssl.SSLError, peer: str) -> WireError:
    """Returns the `WireError` for a failed read, after the handshake as this side sees it."""
    reason = error.reason or ""
    if "ALERT" in reason:
        # The peer reads this side's certificate after this side has completed its handshake.
        return _refused(reason, peer)
    if _is_cut(error):
        return ConnectionBroken(f"the connection to {peer} was cut: its end did not say that it is")
    return ConnectionBroken(
        f"the connection to {peer} broke: what arrived is not what was sent ({_words(reason)})"
    )


def _explain_handshake(error: ssl.SSLError, peer: str) -> WireError:
    reason = error.reason or ""
    if isinstance(error, ssl.SSLCertVerificationError):
        others = (
            f"is not of this job's authority ({error.verify_message}): issue the certificates of "
            "all tasks from one directory, and check the address"
        )
        return AuthenticationError(
            f"the certificate of {peer} {_UNVERIFIED.get(error.verify_code, others)}"
        )
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return AuthenticationError(f"{peer} has no certificate")
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG"):
        return ProtocolMismatch(
            f"{peer} speaks in plain text, and this task only by TLS: give every task of the job "
            "its certificate (`trireme certs`), or none"
        )
    if reason in ("UNSUPPORTED_PROTOCOL", "NO_PROTOCOLS_AVAILABLE"):
        return AuthenticationError(f"{peer} speaks an older TLS than 1.3")
    if _is_cut(error):
        return ConnectionBroken(
            f"{peer} closed the connection during the TLS handshake: it ends, is busy, or does not "
            "speak TLS; see its log"
        )
    if "ALERT" in reason:
        return _refused(reason, peer)
    return FrameError(f"{peer} does not speak TLS as this side does ({_words(reason)})")


def _is_cut(error: ssl.SSLError) -> bool:
    return isinstance(error, ssl.SSLEOFError) or error.reason == "UNEXPECTED_EOF_WHILE_READING"


def _refused(reason: str, peer: str) -> WireError:
    alert = reason.partition("ALERT_")[2]
    if alert in ("INTERNAL_ERROR", "USER_CANCELLED", "CLOSE_NOTIFY"):
        return ConnectionBroken(f"{peer} gave the connection up ({_words(alert)})")
    why = _VERDICTS.get(alert, _words(alert))
    return AuthenticationError(f"{peer} refused this task's certificate: {why}")


def _words(reason: str) -> str:
    return reason.lower().replace("_", " ") or "no reason given"


TLS = Transport("host:port", connect, listen, between_hosts=True, encrypts=True)
