"""The `tls://host:port` transport: TLS 1.3 over TCP, both sides with certificates of one authority.

OpenSSL works on memory here and never sees the socket. Reads and writes hand it 256 KB at a time.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from select import POLLIN, POLLOUT, poll
from typing import TYPE_CHECKING, Any

from trireme.certificates import Certificates
from trireme.errors import (
    AuthenticationError,
    ConfigurationError,
    ConnectionBroken,
    ConnectionClosed,
    ConnectTimeout,
    FrameError,
    PeerClosed,
    ProtocolMismatch,
    WireError,
)
from trireme.launch.config.secret import nameless_file
from trireme.wire.transport import Listener, Stream, Transport
from trireme.wire.transports.socket_stream import explain
from trireme.wire.transports.tcp import bind, dial

if TYPE_CHECKING:
    from typing_extensions import Buffer

TASK_URI = "trireme:"  # the beginning of the URI that names a task in a certificate

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
_PLAIN_TEXT = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG")
_VERDICTS = {
    "unknown ca": "it is of another job's authority",
    "certificate expired": "it has expired, by the clock there",
    "certificate required": "it is missing",
}


def connect(rest: str, *, timeout: float, certificates: Certificates | None) -> Stream:
    """Connects to `host:port` and shakes hands; see `trireme.wire.transport.connect`."""
    assert certificates is not None  # checked by `trireme.wire.transport.connect`
    context = ssl_context(certificates, server_side=False)
    deadline = time.monotonic() + timeout
    connected, called = dial(rest, timeout, "tls")
    stream = TlsStream(connected, f"tls://{rest}", called, context=context, server_side=False)
    try:
        while not stream.shake_hands():
            poller = poll()
            poller.register(stream, POLLIN | (POLLOUT if stream.unsent else 0))
            if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise ConnectTimeout(
                    f"tls://{rest} did not complete the TLS handshake within {timeout:g} s: the "
                    "process there hangs, or does not speak TLS"
                )
    except WireError:
        stream.close()
        raise
    return stream


def listen(
    rest: str, *, allow_plaintext: bool = False, certificates: Certificates | None
) -> Listener:
    """Listens at `host:port`; see `trireme.wire.transport.listen`."""
    assert certificates is not None  # checked by `trireme.wire.transport.listen`
    context = ssl_context(certificates, server_side=True)
    return bind(rest, "tls", partial(TlsStream, context=context, server_side=True))


@cache
def ssl_context(certificates: Certificates, *, server_side: bool) -> ssl.SSLContext:
    """Returns the context of connections that a task opens, or accepts; a task has one of each."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    if server_side:
        context.num_tickets = 0  # each connection proves anew who its ends are
    context.check_hostname = False  # which task answers is checked, by the handshake
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    own, begin, authority = certificates.pem.rpartition("-----BEGIN CERTIFICATE-----")
    try:
        # The system's authorities are not loaded: the job's own is the only one.
        context.load_verify_locations(cadata=begin + authority)
        with nameless_file("certificate") as file:  # OpenSSL's keys come from files only
            file.write(own.encode())
            file.seek(0)  # a system may share the position
            context.load_cert_chain(f"/dev/fd/{file.fileno()}")
    except (ssl.SSLError, ValueError) as error:
        raise ConfigurationError(
            f"a task's certificate cannot be used ({error}): make another with `trireme certs "
            "issue`"
        ) from error
    return context


class TlsStream(Stream):
    """A connected socket under TLS, which this object owns. Reads drive a server's handshake."""

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
        """Goes on with the handshake and never blocks; returns whether it is complete."""
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
                failure = self._failure = _explain(error, self.peer, shaking_hands=True)
                if isinstance(failure, ProtocolMismatch):
                    self._sealed = memoryview(_WRONG_VERSION)  # which OpenSSL does not say
                with suppress(WireError):
                    self._seal()  # tells the peer why
                raise failure from error
            else:
                self._established = True
                names: Any = (self._tls.getpeercert() or {}).get("subjectAltName", ())
                uris = (name for kind, name in names if kind == "URI" and name.startswith(TASK_URI))
                self.certified = tuple(uri.removeprefix(TASK_URI) for uri in uris)
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
            self._failure = error
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


def _explain(error: ssl.SSLError, peer: str, *, shaking_hands: bool = False) -> WireError:
    """Returns the `WireError` for a failure of OpenSSL.

    The peer reads this side's certificate late, so that its verdict may come with the first read.
    """
    reason = error.reason or ""
    words = reason.rpartition("ALERT_")[2].lower().replace("_", " ") or "no reason given"
    if isinstance(error, ssl.SSLCertVerificationError):
        others = (
            f"is not of this job's authority ({error.verify_message}): issue the certificates of "
            "all tasks from one directory, and check the address"
        )
        why = _UNVERIFIED.get(error.verify_code, others)
        return AuthenticationError(f"the certificate of {peer} {why}")
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return AuthenticationError(f"{peer} has no certificate")
    if reason in ("UNSUPPORTED_PROTOCOL", "NO_PROTOCOLS_AVAILABLE"):
        return AuthenticationError(f"{peer} speaks an older TLS than 1.3")
    if shaking_hands and reason in _PLAIN_TEXT:
        return ProtocolMismatch(
            f"{peer} speaks in plain text, and this task only by TLS: give every task of the job "
            "its certificate (`trireme certs`), or none"
        )
    if isinstance(error, ssl.SSLEOFError) or reason == "UNEXPECTED_EOF_WHILE_READING":
        when = " during the TLS handshake" if shaking_hands else ""
        return ConnectionBroken(
            f"the connection to {peer} was cut{when}: its end did not say that it is; see its log"
        )
    if "ALERT" in reason:
        if words in ("internal error", "user cancelled", "close notify"):
            return ConnectionBroken(f"{peer} gave the connection up ({words})")
        return AuthenticationError(
            f"{peer} refused this task's certificate: {_VERDICTS.get(words, words)}"
        )
    if shaking_hands:
        return FrameError(f"{peer} does not speak TLS as this side does ({words})")
    return ConnectionBroken(
        f"the connection to {peer} broke: what arrived is not what was sent ({words})"
    )


TLS = Transport("host:port", connect, listen, between_hosts=True, encrypts=True)
