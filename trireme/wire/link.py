"""One connection in a service's loop: a stranger, then a link to a known task, then closing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trireme.errors import AuthenticationError, ConnectionBroken, FrameError, WireError
from trireme.wire.connection import Connection, Destination
from trireme.wire.handshake import HANDSHAKE_TIMEOUT, Identity, ServerHandshake
from trireme.wire.lending import Lending
from trireme.wire.message import Message
from trireme.wire.polling import READABLE, WRITABLE
from trireme.wire.transport import Stream

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from trireme.wire.service import Service

__all__ = ["Bounds", "Link", "Peer"]

_TURN_MESSAGES = 32  # how many messages of one link are handled before the others have their turn


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one service bears.

    Attributes:
        strangers: how many connections may be unauthenticated at a time; one more and the oldest
            is closed.
        handshake_seconds: how long each of them may take.
        unsent_bytes: a link that has more than this unsent when the next message is offered to
            it is closed: its peer does not read.
        linger_seconds: how long a closing link, or a stopping service, goes on sending what was
            offered before.
    """

    strangers: int = 128
    handshake_seconds: float = HANDSHAKE_TIMEOUT
    unsent_bytes: int = 1 << 28
    linger_seconds: float = 2.0


class Link:
    """One authenticated connection of a service, for its handlers.

    Attributes:
        identity: who the peer has proven to be.
        context: for the handler that serves this peer; the service never looks at it.
        opened_here: whether this process has made the connection, and not the peer.
        departing: whether the peer has said that it goes. It need not read what it is still sent,
            and if its connection breaks then, that is no news.
    """

    def __init__(
        self, connection: Connection, identity: Identity, owner: Peer, *, opened_here: bool
    ) -> None:
        self.identity = identity
        self.opened_here = opened_here
        self.context: Any = None
        self.departing = False
        self._connection = connection
        self._owner = owner

    def __repr__(self) -> str:
        return f"<Link to {self.identity.task} at {self.peer}>"

    @property
    def peer(self) -> str:
        """The address of the other end, for messages."""
        return self._connection.peer

    @property
    def unsent(self) -> int:
        """How many offered bytes have not gone out yet."""
        return self._connection.unsent

    @property
    def closed(self) -> bool:
        """Whether this link is closed or closing."""
        return self._owner.over

    @property
    def destination(self) -> Destination | None:
        """Where payloads go; see `Connection.destination`. May be replaced at any time."""
        return self._connection.destination

    @destination.setter
    def destination(self, destination: Destination | None) -> None:
        self._connection.destination = destination

    @property
    def stream(self) -> Stream:
        """The stream below, for what only one transport has."""
        return self._connection.stream

    @property
    def lending(self) -> Lending | None:
        """Memory that both sides see; see `Connection.lending`."""
        return self._connection.lending

    @lending.setter
    def lending(self, lending: Lending | None) -> None:
        self._connection.lending = lending

    def offer(self, message: Message, payload: Iterable[Buffer] = (), *, sequence: int = 0) -> bool:
        """Sends without blocking; see `Connection.offer`. What is left goes out by itself.

        A link that fails does not raise here: the handlers are told by `closed`, later, and
        what is offered to a link that is gone is dropped.

        Returns:
            Whether all of it has gone out.

        Raises:
            ValueError: the message is not one of the handlers'.
        """
        return self._owner.offer(message, payload, sequence)

    def close(self) -> None:
        """Receives no more, sends what was offered before, then closes. May be repeated."""
        self._owner.finish()


class Peer:
    """What the service itself knows of one connection; a `Link` is the handlers' view of it."""

    def __init__(
        self, service: Service, connection: Connection, handshake: ServerHandshake | None = None
    ) -> None:
        self.connection = connection
        self.link: Link | None = None
        self.over = False
        self._service = service
        self._handshake = handshake
        self._unsent_bytes = service.bounds.unsent_bytes
        self._events = READABLE
        # When it is dropped, and why, unless something happens before.
        self._deadline: float | None = None
        self._verdict: WireError | None = None
        if handshake is not None:
            seconds = service.bounds.handshake_seconds
            error = AuthenticationError(f"it did not prove itself within {seconds:g} s")
            self._expect(seconds, error)

    @property
    def name(self) -> str:
        """Who it is, for messages."""
        task = self.link.identity.task if self.link else "a stranger"
        return f"{task} at {self.connection.peer}"

    def ready(self, mask: int) -> None:
        """Goes on after something has happened to the descriptor."""
        # Hang-up and error are found out by whatever is tried next.
        if self._events & WRITABLE and mask != READABLE:
            self._flush()
        if self._events & READABLE and mask != WRITABLE:
            self.receive()

    def receive(self) -> None:
        """Handles the messages that are there, up to a number."""
        for _ in range(_TURN_MESSAGES):
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
            self._watch()
        return done

    def finish(self) -> None:
        """See `Link.close`."""
        if self.over:
            return
        self.over = True
        if self.connection.wants_write:
            self._expect(self._service.bounds.linger_seconds, None)
            self._watch()
        else:
            self._service.drop(self, None)

    def expire(self, now: float) -> None:
        """Drops the peer if its deadline has passed."""
        if self._deadline is not None and now >= self._deadline:
            self._fail(self._verdict)

    def welcome(self, identity: Identity) -> Link:
        """The peer is who it says: it may speak, and the handlers are told."""
        self._deadline = None
        self.connection.catalog = self._service.catalog
        self.connection.limits = self._service.limits
        self.link = Link(self.connection, identity, self, opened_here=self._handshake is None)
        for handler in self._service.handlers:
            handler.authenticated(self.link)
        return self.link

    def _shake_hands(self, message: Message) -> None:
        handshake = self._handshake
        assert handshake is not None  # or it was adopted, and has a link
        self.offer(handshake.answer(message))
        if handshake.denied:
            if not handshake.early:
                reason = f"denied {self.name}: {handshake.denied}"
                self._service.refusals.say(self._service.clock.now(), reason)
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
            self._watch()

    def _cannot_send(self, error: WireError) -> None:
        """What the peer said before it went away is still read: the receiving side ends this."""
        if self.over:
            self._service.drop(self, None)
            return
        if self._deadline is None:
            self._expect(self._service.bounds.linger_seconds, error)
        self._watch()

    def _fail(self, error: WireError | None) -> None:
        self.over = True
        self._service.drop(self, error)

    def _expect(self, seconds: float, verdict: WireError | None) -> None:
        self._deadline = self._service.clock.now() + seconds
        self._verdict = verdict

    def _watch(self) -> None:
        events = 0 if self.over else READABLE
        if self.connection.wants_write:
            events |= WRITABLE
        if events != self._events:
            self._events = events
            self._service.watch(self, events)
