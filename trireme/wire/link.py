"""One connection of a service: unauthenticated, then to a known task, then closing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from trireme.clock import Clock
from trireme.errors import AuthenticationError, ConnectionBroken, WireError
from trireme.wire.connection import Connection
from trireme.wire.handshake import HANDSHAKE_TIMEOUT, Identity, ServerHandshake
from trireme.wire.message import Message
from trireme.wire.polling import READABLE, WRITABLE

if TYPE_CHECKING:
    from typing_extensions import Buffer

_NOBODY = Identity("", "an unauthenticated peer")


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """The limits that a service sets to its peers."""

    unauthenticated: int = 128  # connections at a time; one more, and the oldest is closed
    connections: int = 4096  # that may be open at a time; one more is closed at once
    handshake_seconds: float = HANDSHAKE_TIMEOUT  # that of TLS included, however little comes
    tries: int = 20  # connections of one host that may be refused before it is not listened to
    try_seconds: float = 1.0  # after so long a host has one more try
    unsent_bytes: int = 1 << 28  # of a link when the next message is offered: its peer must read
    linger_seconds: float = 2.0  # how long a closing link, or service, sends what was offered


class Loop(Protocol):
    """What a link asks of the service that owns it."""

    service_limits: ServiceLimits
    clock: Clock

    def watch(self, link: Link, events: int) -> None:
        """Waits for these events of a link from now on."""

    def drop(self, link: Link, error: WireError | None) -> None:
        """Closes a link. The handlers' `closed` is called at the end of the turn."""


class Link:
    """One connection of a service. Handlers see it once its peer has authenticated.

    Handlers call `offer` and `close`; the service receives, and calls the other methods.

    Attributes:
        identity: the identity that the peer has proven.
        connection: the connection, of which a handler may set `destination` and `lending`.
        context: an object of the handler that serves this peer; the service never uses it.
        handshake: authenticates the peer; None where this process opened the connection.
        departing: whether the peer has announced that it leaves. It need not read what is still
            sent to it, and a break of its connection is not logged as a warning.
        closed: whether this link is closed or closing.
        windowed: whether its handler waits for confirmations before it offers more, so that the
            link need not limit what is unsent. Handlers set it.
        events: the events of the descriptor that the service waits for.
    """

    def __init__(
        self, service: Loop, connection: Connection, handshake: ServerHandshake | None = None
    ) -> None:
        self.identity = _NOBODY
        self.connection = connection
        self.context: Any = None
        self.authenticated = False
        self.opened_here = handshake is None
        self.departing = False
        self.closed = False
        self.windowed = False
        self._service = service
        self.handshake = handshake
        self._unsent_bytes = service.service_limits.unsent_bytes
        self.events = READABLE
        # When the link is dropped, and the error for that, unless something happens before.
        self._deadline: float | None = None
        self._expiry_error: WireError | None = None
        if handshake is not None:
            seconds = service.service_limits.handshake_seconds
            error = AuthenticationError(f"it did not authenticate within {seconds:g} s")
            self._set_deadline(seconds, error)

    def __repr__(self) -> str:
        return f"<Link to {self.name}>"

    @property
    def name(self) -> str:
        """The peer's name, for messages."""
        return f"{self.identity.task} at {self.connection.peer}"

    # -- for handlers ----------------------------------------------------------------------------

    def offer(self, message: Message, payload: Iterable[Buffer] = (), *, sequence: int = 0) -> bool:
        """Sends without blocking; returns whether all was sent. The service sends the rest later.

        A failure does not raise here: the handlers' `closed` is called later. Messages that are
        offered to a closed link are dropped.
        """
        if self.closed:
            return False
        if not self.windowed and self.connection.unsent > self._unsent_bytes:
            error = f"it does not read; {self.connection.unsent} bytes are unsent"
            self.fail(ConnectionBroken(error))
            return False
        try:
            done = self.connection.offer(message, payload, sequence=sequence)
        except WireError as error:
            self._cannot_send(error)
            return False
        if not done:
            self._update_events()
        return done

    def close(self) -> None:
        """Stops receiving, sends what was offered before, then closes. May be repeated."""
        if self.closed:
            return
        self.closed = True
        if self.connection.unsent:
            self._set_deadline(self._service.service_limits.linger_seconds, None)
            self._update_events()
        else:
            self._service.drop(self, None)

    # -- for the service -------------------------------------------------------------------------

    def expire(self, now: float) -> None:
        """Drops the link if its deadline has passed."""
        if self._deadline is not None and now >= self._deadline:
            self.fail(self._expiry_error)

    def admit(self, identity: Identity) -> None:
        """Accepts an authenticated peer."""
        self._deadline = None
        self.identity, self.authenticated = identity, True

    def flush(self) -> None:
        """Sends more of what was offered."""
        try:
            self.connection.flush()
        except WireError as error:
            self._cannot_send(error)
            return
        if self.closed and not self.connection.unsent:
            self._service.drop(self, None)
        else:
            self._update_events()

    def fail(self, error: WireError | None) -> None:
        """Drops the link at once."""
        self.closed = True
        self._service.drop(self, error)

    # -- inside ----------------------------------------------------------------------------------

    def _cannot_send(self, error: WireError) -> None:
        """Notes a failed send. Messages that the peer sent before are still received."""
        if self.closed:
            self._service.drop(self, None)
            return
        if self._deadline is None:
            self._set_deadline(self._service.service_limits.linger_seconds, error)
        self._update_events()

    def _set_deadline(self, seconds: float, error: WireError | None) -> None:
        self._deadline = self._service.clock.now() + seconds
        self._expiry_error = error

    def _update_events(self) -> None:
        events = 0 if self.closed else READABLE
        if self.connection.unsent:
            events |= WRITABLE
        if events != self.events:
            self.events = events
            self._service.watch(self, events)
