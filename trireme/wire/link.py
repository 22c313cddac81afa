"""One connection of a service: unauthenticated, then a link to a known task, then closing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trireme.errors import AuthenticationError, ConnectionBroken, FrameError, WireError
from trireme.wire.connection import Connection
from trireme.wire.handshake import HANDSHAKE_TIMEOUT, Identity, ServerHandshake
from trireme.wire.message import Message
from trireme.wire.polling import READABLE, WRITABLE

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from trireme.wire.service import Service

__all__ = ["Link", "Peer", "ServiceLimits"]

_MESSAGES_AT_ONCE = 32  # how many messages of one link are handled before other links'


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """The limits that a service sets to its peers.

    Attributes:
        unauthenticated: how many connections may be unauthenticated at a time. One more, and the
            oldest of them is closed.
        handshake_seconds: how long a handshake may take.
        unsent_bytes: how many bytes of a link may be unsent when the next message is offered. A
            link with more is closed, because its peer does not read.
        linger_seconds: how long a closing link, or a stopping service, goes on sending what was
            offered before.
    """

    unauthenticated: int = 128
    handshake_seconds: float = HANDSHAKE_TIMEOUT
    unsent_bytes: int = 1 << 28
    linger_seconds: float = 2.0


class Link:
    """One authenticated connection of a service, for its handlers.

    Attributes:
        identity: the identity that the peer has proven.
        connection: the connection, of which a handler may set `destination` and `lending`.
        context: an object of the handler that serves this peer; the service never uses it.
        opened_here: whether this process opened the connection, and not the peer.
        departing: whether the peer has announced that it leaves. It need not read what is still
            sent to it, and a break of its connection is not logged as a warning.
    """

    def __init__(
        self, connection: Connection, identity: Identity, owner: Peer, *, opened_here: bool
    ) -> None:
        self.identity = identity
        self.opened_here = opened_here
        self.context: Any = None
        self.departing = False
        self.connection = connection
        self._owner = owner

    def __repr__(self) -> str:
        return f"<Link to {self.identity.task} at {self.connection.peer}>"

    @property
    def closed(self) -> bool:
        """Whether this link is closed or closing."""
        return self._owner.over

    def offer(self, message: Message, payload: Iterable[Buffer] = (), *, sequence: int = 0) -> bool:
        """Sends without blocking; see `Connection.offer`. The service sends the rest later.

        A failure does not raise here: the handlers' `closed` is called later. Messages that are
        offered to a closed link are dropped.

        Returns:
            Whether all of the message was sent.

        Raises:
            ValueError: the message is not one of the handlers'.
        """
        return self._owner.offer(message, payload, sequence)

    def close(self) -> None:
        """Stops receiving, sends what was offered before, then closes. May be repeated."""
        self._owner.finish()


class Peer:
    """One connection as the service handles it. Handlers see it as a `Link`."""

    def __init__(
        self, service: Service, connection: Connection, handshake: ServerHandshake | None = None
    ) -> None:
        self.connection = connection
        self.link: Link | None = None
        self.over = False
        self._service = service
        self._handshake = handshake
        self._unsent_bytes = service.service_limits.unsent_bytes
        self._events = READABLE
        # When the peer is dropped, and the error for that, unless something happens before.
        self._deadline: float | None = None
        self._expiry_error: WireError | None = None
        if handshake is not None:
            seconds = service.service_limits.handshake_seconds
            error = AuthenticationError(f"it did not authenticate within {seconds:g} s")
            self._set_deadline(seconds, error)

    @property
    def name(self) -> str:
        """The peer's name, for messages."""
        task = self.link.identity.task if self.link else "an unauthenticated peer"
        return f"{task} at {self.connection.peer}"

    def ready(self, mask: int) -> None:
        """Handles events of the descriptor."""
        # The next read or write detects a hang-up or an error.
        if self._events & WRITABLE and mask != READABLE:
            self._flush()
        if self._events & READABLE and mask != WRITABLE:
            self.receive()

    def receive(self) -> None:
        """Handles the messages that have arrived, up to a number."""
        for _ in range(_MESSAGES_AT_ONCE):
            if self.over:
                return
            try:
                incoming = self.connection.poll()
            except WireError as error:
                self._fail(error)
                return
            if incoming is None:
                return
            if self.link is None:
                self._shake_hands(incoming.message)
            else:
                try:
                    self._service.handler_of[type(incoming.message)].received(self.link, incoming)
                except FrameError as error:
                    self._fail(error)
            if not self.connection.buffered:
                return
        self._service.resume(self)

    def offer(self, message: Message, payload: Iterable[Buffer] = (), sequence: int = 0) -> bool:
        """See `Link.offer`."""
        if self.over:
            return False
        if self.connection.unsent > self._unsent_bytes:
            error = f"it does not read; {self.connection.unsent} bytes are unsent"
            self._fail(ConnectionBroken(error))
            return False
        try:
            done = self.connection.offer(message, payload, sequence=sequence)
        except WireError as error:
            self._cannot_send(error)
            return False
        if not done:
            self._update_events()
        return done

    def finish(self) -> None:
        """See `Link.close`."""
        if self.over:
            return
        self.over = True
        if self.connection.wants_write:
            self._set_deadline(self._service.service_limits.linger_seconds, None)
            self._update_events()
        else:
            self._service.drop(self, None)

    def expire(self, now: float) -> None:
        """Drops the peer if its deadline has passed."""
        if self._deadline is not None and now >= self._deadline:
            self._fail(self._expiry_error)

    def welcome(self, identity: Identity) -> Link:
        """Accepts an authenticated peer, and calls the handlers' `authenticated`."""
        self._deadline = None
        self.connection.catalog = self._service.catalog
        self.connection.limits = self._service.limits
        self.link = Link(self.connection, identity, self, opened_here=self._handshake is None)
        for handler in self._service.handlers:
            handler.authenticated(self.link)
        return self.link

    def _shake_hands(self, message: Message) -> None:
        handshake = self._handshake
        assert handshake is not None  # else it was adopted, and has a link
        self.offer(handshake.answer(message))
        if handshake.denied:
            if not handshake.early:
                reason = f"denied {self.name}: {handshake.denied}"
                self._service.refusals.log(self._service.clock.now(), reason)
            self.finish()
        elif handshake.identity and not self.over:
            self.welcome(handshake.identity)

    def _flush(self) -> None:
        try:
            self.connection.flush()
        except WireError as error:
            self._cannot_send(error)
            return
        if self.over and not self.connection.wants_write:
            self._service.drop(self, None)
        else:
            self._update_events()

    def _cannot_send(self, error: WireError) -> None:
        """Notes a failed send. Messages that the peer sent before are still received."""
        if self.over:
            self._service.drop(self, None)
            return
        if self._deadline is None:
            self._set_deadline(self._service.service_limits.linger_seconds, error)
        self._update_events()

    def _fail(self, error: WireError | None) -> None:
        self.over = True
        self._service.drop(self, error)

    def _set_deadline(self, seconds: float, error: WireError | None) -> None:
        self._deadline = self._service.clock.now() + seconds
        self._expiry_error = error

    def _update_events(self) -> None:
        events = 0 if self.over else READABLE
        if self.connection.wants_write:
            events |= WRITABLE
        if events != self._events:
            self._events = events
            self._service.watch(self, events)
