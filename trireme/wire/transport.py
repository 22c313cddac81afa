"""Byte streams between processes, and the choice of a transport by the address.

    tcp://host:port    sockets; `trireme.wire.transports.tcp`
    tls://host:port    sockets under TLS 1.3; the plug-in `tls`
    shm://name         one host, by unix socket and shared memory; the plug-in `shm`

A transport is an entry point, named as its scheme, whose object is a `Transport`. Every transport
must pass `tests/conformance.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from trireme.certificates import Certificates
from trireme.errors import ConfigurationError, suggestion
from trireme.plugins import Plugins
from trireme.wire.shared_memory import LocalMemory

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Stream(ABC):
    """An ordered stream of bytes in each direction, never blocking. Used by one thread at a time.

    Reading and writing raise `PeerClosed` when the peer has closed and all it had sent was read,
    `ConnectionBroken` when the peer or the network reset the connection, `ConnectionClosed` after
    this side's own `close`. Only an answer shows that bytes arrived.

    Attributes:
        peer: the address of the other end, for messages.
        called: the address that the client called, as this side sees it, in numbers:
            `tcp://127.0.0.1:2222`. Both see the same, unless something relays the connection.
        certified: the tasks that the peer's certificate names, such as `worker:1`; None where the
            transport has no certificates.
        pending: whether bytes may be read that the descriptor does not announce. Before you wait on
            the descriptor, read until this is False.
        passes_descriptors: whether the connecting side may pass descriptors of files, one at a
            time, as shared memory needs it.
    """

    peer: str
    called: str
    certified: tuple[str, ...] | None = None
    pending: bool = False
    passes_descriptors: bool = False

    @property
    def unsent(self) -> int:
        """How many bytes the stream holds for `write`, until the system takes them; see `flush`."""
        return 0

    @abstractmethod
    def fileno(self) -> int:
        """Returns the descriptor to wait on."""

    @abstractmethod
    def read_into(self, buffers: Sequence[memoryview]) -> int:
        """Reads what is there into the buffers, one after the other; returns how many bytes."""

    @abstractmethod
    def write(self, buffers: Sequence[Buffer]) -> int:
        """Takes bytes from the front of the buffers, in order; returns how many, 0 without room.

        The buffers may be changed as soon as the call returns.
        """

    def flush(self) -> bool:
        """Hands the system what is `unsent`; returns whether nothing is left."""
        return True

    @abstractmethod
    def close(self) -> None:
        """Closes this end; what is not `unsent` is still delivered. May be repeated."""

    def pass_descriptor(self, descriptor: int) -> None:
        """Sends a descriptor along with the next bytes. The caller keeps its own copy."""
        raise NotImplementedError

    def take_descriptor(self) -> int | None:
        """Returns the descriptor that came, once; None if there is none. The caller owns it."""
        return None

    def expect_descriptor(self) -> None:
        """Takes another descriptor: the system closes those that nobody expects."""
        raise NotImplementedError


class Listener(ABC):
    """Accepts connections at `address`, which has the port or name that the system chose."""

    address: str

    @abstractmethod
    def fileno(self) -> int:
        """Returns the descriptor to wait on: readable when a connection waits."""

    @abstractmethod
    def accept(self) -> Stream | None:
        """Returns the next connection, or None when none waits.

        Raises:
            ConnectionClosed: after `close`.
            WireError: the system cannot open another connection now. Waiting ones are kept.
        """

    @abstractmethod
    def close(self) -> None:
        """Stops listening and frees the address. Accepted streams stay open. May be repeated."""


class Connect(Protocol):
    """Connects to an address without its scheme, as `connect` says."""

    def __call__(
        self, rest: str, *, timeout: float, certificates: Certificates | None
    ) -> Stream: ...


class Listen(Protocol):
    """Listens at an address without its scheme, as `listen` says."""

    def __call__(
        self, rest: str, *, allow_plaintext: bool, certificates: Certificates | None
    ) -> Listener: ...


@dataclass(frozen=True, slots=True)
class Transport:
    """A transport.

    Attributes:
        form: how an address is written after the scheme, such as `host:port`.
        between_hosts: whether other hosts can reach an address.
        encrypts: whether both sides prove themselves by certificates, and what is sent is secret.
        memory: how its processes share memory; None where they cannot.
        serves_jobs: whether `--transport` may name it: a server then listens at `host:0`, and the
            address that it got is the one that others call.
    """

    form: str
    connect: Connect
    listen: Listen
    between_hosts: bool = False
    encrypts: bool = False
    serves_jobs: bool = False
    memory: LocalMemory | None = None


TRANSPORTS = Plugins("trireme.transports", "transport", Transport)  # by scheme


def local_memory() -> LocalMemory | None:
    """Returns how processes of this host share memory; None where they cannot."""
    transport = TRANSPORTS.find("shm")
    memory = None if transport is None else transport.memory
    return memory if memory is not None and memory.available() else None


def connect(address: str, *, timeout: float, certificates: Certificates | None = None) -> Stream:
    """Connects to a listener, trying once.

    Raises:
        ConfigurationError: the address is malformed, its scheme unknown, or there must or must not
            be certificates.
        WireError: nothing answers, or not as it should.
    """
    transport, rest = _resolve(address, certificates)
    return transport.connect(rest, timeout=timeout, certificates=certificates)


def listen(
    address: str, *, allow_plaintext: bool = False, certificates: Certificates | None = None
) -> Listener:
    """Listens at an address; port 0 or an empty name leaves the choice to the system.

    Raises:
        ConfigurationError: as `connect`; or the address is not this host's, or open to others.
        WireError: another process listens there, or the system refuses.
    """
    transport, rest = _resolve(address, certificates)
    return transport.listen(rest, allow_plaintext=allow_plaintext, certificates=certificates)


def check_transport(name: str, origin: str) -> None:
    """Raises `ConfigurationError` if a job cannot have a transport of that name."""
    if name == "auto" or (name in TRANSPORTS and TRANSPORTS.load(name).serves_jobs):
        return
    serving = [each for each, transport in TRANSPORTS.all().items() if transport.serves_jobs]
    known = ["auto", *serving]
    raise ConfigurationError(
        f"transport is {name!r} ({origin}): it must be one of {', '.join(known)}"
        f"{suggestion(name, known)}"
    )


def _resolve(address: str, certificates: Certificates | None) -> tuple[Transport, str]:
    scheme, separator, rest = address.partition("://")
    if not separator:
        raise ConfigurationError(
            f"the address {address!r} has no scheme: write it as tcp://host:port"
        )
    TRANSPORTS.check(scheme)
    if scheme not in TRANSPORTS:
        known = (f"{name}://{each.form}" for name, each in TRANSPORTS.all().items())
        raise ConfigurationError(
            f"the address {address!r} has an unknown scheme {scheme!r}: there are "
            f"{', '.join(known)}, and those of packages that you install"
        )
    transport = TRANSPORTS.load(scheme)
    if transport.encrypts and certificates is None:
        raise ConfigurationError(
            f"{address} needs TLS, and this task has no certificate: make one with `trireme certs "
            "issue`, and name its directory with --certs"
        )
    if transport.between_hosts and not transport.encrypts and certificates is not None:
        raise ConfigurationError(
            f"{address} is without TLS, and this task has a certificate: nothing is sent in plain "
            "text. Give every task of the job its certificate, or none"
        )
    return transport, rest
