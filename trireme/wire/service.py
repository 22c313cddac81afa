"""One thread that serves many connections: accepts, authenticates, hands messages to handlers.

The kind of a message picks the handler, so that a parameter server and a coordinator can share
one listener. Handlers run in the loop's thread and must not block. A peer that misbehaves is
closed and logged, and the others are served on; an exception in a handler is a bug of ours: it is
logged and ends `run`.
"""

from __future__ import annotations

import logging
import selectors
import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from trireme.clock import Clock, MonotonicClock
from trireme.errors import AuthenticationError, ConnectionBroken, FrameError, PeerClosed, WireError
from trireme.wire.connection import Connection, Destination, Incoming
from trireme.wire.handshake import (
    HANDSHAKE_CATALOG,
    HANDSHAKE_TIMEOUT,
    Identity,
    ServerHandshake,
)
from trireme.wire.message import HANDSHAKE_LIMITS, Catalog, Limits, Message
from trireme.wire.transport import Listener, Stream

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Bounds", "Handler", "Link", "Service"]

_log = logging.getLogger(__name__)

_TURN_MESSAGES = 32  # how many messages of one link are handled before the others have their turn
_TURN_ACCEPTS = 32
_DEFAULT_LIMITS = Limits()


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


_DEFAULT_BOUNDS = Bounds()


class Handler(Protocol):
    """What serves a range of messages. All of it is called in the service's thread."""

    @property
    def messages(self) -> tuple[type[Message], ...]:
        """The message types that it receives and sends; no other handler may have them."""

    def authenticated(self, link: Link) -> None:
        """A peer has proven itself. Every handler is told of every link."""

    def received(self, link: Link, incoming: Incoming) -> None:
        """A message of this handler's came.

        Raises:
            FrameError: the peer may not say this: the link is closed.
        """

    def closed(self, link: Link, error: WireError | None) -> None:
        """An authenticated link is gone. Every handler is told, once.

        Args:
            link: the link.
            error: why; None if this side closed it, by `Link.close` or by stopping.
        """

    def tick(self, now: float) -> None:
        """Called about every `tick_seconds` of the service's clock."""


class Link:
    """One authenticated connection of a service, for its handlers.

    Attributes:
        identity: who the peer has proven to be.
        context: for the handler that serves this peer; the service never looks at it.
    """

    def __init__(self, connection: Connection, identity: Identity, owner: _Peer) -> None:
        self.identity = identity
        self.context: Any = None
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


class Service:
    """Accepts connections and serves them in one loop, until it is stopped.

    It owns the listener and its connections: they are closed when `run` ends.
    """

    def __init__(
        self,
        listener: Listener,
        handlers: Sequence[Handler],
        *,
        job: str,
        secret: bytes,
        clock: Clock | None = None,
        tick_seconds: float = 0.1,
        limits: Limits = _DEFAULT_LIMITS,
        bounds: Bounds = _DEFAULT_BOUNDS,
    ) -> None:
        """Prepares to serve; nothing is accepted before `run`.

        Args:
            listener: where peers connect to.
            handlers: who serves them.
            job: the job's id, which peers must name.
            secret: the job's, which they must prove to know.
            clock: for ticks and deadlines.
            tick_seconds: how often handlers are ticked.
            limits: the largest frame of an authenticated peer.
            bounds: what is borne of peers otherwise.

        Raises:
            ValueError: two handlers want the same kind of message.
        """
        self.catalog = Catalog(kind for handler in handlers for kind in handler.messages)
        self.limits = limits
        self.bounds = bounds
        self.clock = clock or MonotonicClock()
        self.handlers = tuple(handlers)
        self._handler_of = {
            message: handler for handler in handlers for message in handler.messages
        }
        self._listener = listener
        self._job = job
        self._secret = secret
        self._tick_seconds = tick_seconds
        self._peers: dict[_Peer, None] = {}  # in the order in which they came
        self._ready: deque[_Peer] = deque()
        self._departed: deque[tuple[Link, WireError | None]] = deque()
        self._calls: deque[Callable[[], object]] = deque()
        self._stopping = False
        self._accepting = False
        self._door, self._bell = socket.socketpair()
        self._door.setblocking(False)
        self._bell.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._door, selectors.EVENT_READ, self._woken)

    @property
    def address(self) -> str:
        """Where it listens."""
        return self._listener.address

    # From any thread ---------------------------------------------------------------------------

    def stop(self) -> None:
        """Ends `run` soon, after what was offered has been sent. May be repeated."""
        self._stopping = True
        self._wake()

    def call_soon(self, function: Callable[[], object]) -> None:
        """Has the loop call a function; forgotten if the service ends before."""
        self._calls.append(function)
        self._wake()

    def _wake(self) -> None:
        # A full pipe has woken it already; a closed one belongs to a service that has ended.
        with suppress(OSError):
            self._bell.send(b"\0")

    # The loop ----------------------------------------------------------------------------------

    def run(self) -> None:
        """Serves until `stop`; then tells the handlers that their links are closed.

        Raises:
            Exception: whatever a handler raised, other than `FrameError` from `received`.
        """
        try:
            self._serve()
            self._linger()
        except Exception:
            _log.exception("the service at %s ends by an error of its own", self.address)
            raise
        finally:
            self._close()

    def _serve(self) -> None:
        next_tick = self.clock.now()
        while not self._stopping:
            now = self.clock.now()
            if now >= next_tick:
                self._tick(now)
                next_tick = now + self._tick_seconds
            pending = self._ready or self._departed or self._calls
            self._turn(0 if pending else next_tick - now)

    def _turn(self, timeout: float) -> bool:
        """Waits for events and handles them; returns whether there were any."""
        events = self._selector.select(timeout)
        for key, mask in events:
            key.data(mask)
        if self._calls or self._ready or self._departed:
            self._catch_up()
        return bool(events)

    def _catch_up(self) -> None:
        """Does once what has gathered; what comes up meanwhile is for the next turn."""
        for _ in range(len(self._calls)):
            self._calls.popleft()()
        for _ in range(len(self._ready)):
            self._ready.popleft().receive()
        self._tell_departed()

    def _tell_departed(self) -> None:
        for _ in range(len(self._departed)):
            link, error = self._departed.popleft()
            for handler in self.handlers:
                handler.closed(link, error)

    def _tick(self, now: float) -> None:
        self._listen()
        self._sweep(now)
        for handler in self.handlers:
            handler.tick(now)

    def _sweep(self, now: float) -> None:
        for peer in list(self._peers):
            peer.expire(now)

    def _woken(self, mask: int) -> None:
        with suppress(BlockingIOError):
            self._door.recv(4096)

    def _linger(self) -> None:
        """Sends what was offered, then drops everybody."""
        self._deafen()
        self._listener.close()
        for peer in list(self._peers):
            peer.finish()
        quiet = 0.0  # counted too, so that it ends under a clock that stands still
        while self._peers and quiet < self.bounds.linger_seconds:
            quiet = 0.0 if self._turn(self._tick_seconds) else quiet + self._tick_seconds
            self._sweep(self.clock.now())
        for peer in list(self._peers):
            self.drop(peer, None)
        self._tell_departed()

    def _close(self) -> None:
        for peer in list(self._peers):
            self.drop(peer, None)
        self._selector.close()
        self._listener.close()
        self._door.close()
        self._bell.close()

    # Peers -------------------------------------------------------------------------------------

    def _listen(self) -> None:
        if not self._accepting:
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            self._accepting = True

    def _deafen(self) -> None:
        if self._accepting:
            self._selector.unregister(self._listener)
            self._accepting = False

    def _accept(self, mask: int) -> None:
        for _ in range(_TURN_ACCEPTS):
            try:
                stream = self._listener.accept()
            except WireError as error:
                _log.warning("%s; trying again at the next tick", error)
                self._deafen()
                return
            if stream is None:
                return
            self._admit(stream)

    def _admit(self, stream: Stream) -> None:
        strangers = [peer for peer in self._peers if peer.link is None]
        if len(strangers) >= self.bounds.strangers:
            reason = f"{len(strangers)} connections wait to prove themselves, this one longest"
            self.drop(strangers[0], AuthenticationError(reason))
        peer = _Peer(self, stream, ServerHandshake(self._job, self._secret))
        self._peers[peer] = None
        self._selector.register(stream, selectors.EVENT_READ, peer.ready)

    def watch(self, peer: _Peer, events: int) -> None:
        """Waits for these events of a peer from now on."""
        self._selector.modify(peer.connection, events, peer.ready)

    def resume(self, peer: _Peer) -> None:
        """Lets a peer receive again in the next turn, whatever its descriptor says."""
        self._ready.append(peer)

    def handle(self, link: Link, incoming: Incoming) -> None:
        """Hands a message to the handler of its type."""
        self._handler_of[type(incoming.message)].received(link, incoming)

    def drop(self, peer: _Peer, error: WireError | None) -> None:
        """Closes a peer; the handlers are told at the end of the turn."""
        if peer not in self._peers:
            return
        del self._peers[peer]
        self._selector.unregister(peer.connection)
        peer.connection.close()
        if peer.link is not None:
            self._departed.append((peer.link, error))
        if error is not None:
            level = logging.DEBUG if isinstance(error, PeerClosed) else logging.WARNING
            _log.log(level, "closed the connection of %s: %s", peer.name, error)


class _Peer:
    """One connection in the loop: a stranger, then linked, then closing."""

    def __init__(self, service: Service, stream: Stream, handshake: ServerHandshake) -> None:
        self.connection = Connection(
            stream, HANDSHAKE_CATALOG, limits=HANDSHAKE_LIMITS, clock=service.clock
        )
        self.link: Link | None = None
        self.over = False
        self._service = service
        self._handshake = handshake
        self._events = selectors.EVENT_READ
        # When it is dropped, and why, unless something happens before.
        self._deadline: float | None = None
        self._verdict: WireError | None = None
        self._expect(service.bounds.handshake_seconds, AuthenticationError("no proof in time"))

    @property
    def name(self) -> str:
        """Who it is, for messages."""
        task = self.link.identity.task if self.link else "a stranger"
        return f"{task} at {self.connection.peer}"

    def ready(self, mask: int) -> None:
        """Goes on after the descriptor has become readable or writable."""
        if mask & selectors.EVENT_WRITE:
            self._flush()
        if mask & selectors.EVENT_READ:
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
                    self._service.handle(self.link, incoming)
                except FrameError as error:
                    self._fail(error)
            if not self.connection.buffered:
                return
        self._service.resume(self)

    def offer(self, message: Message, payload: Iterable[Buffer] = (), sequence: int = 0) -> bool:
        """See `Link.offer`."""
        if self.over:
            return False
        if self.connection.unsent > self._service.bounds.unsent_bytes:
            self._fail(
                ConnectionBroken(f"it does not read; {self.connection.unsent} bytes are unsent")
            )
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

    def _shake_hands(self, message: Message) -> None:
        self.offer(self._handshake.answer(message))
        if self._handshake.denied:
            _log.warning("denied %s: %s", self.name, self._handshake.denied)
            self.finish()
        elif self._handshake.identity and not self.over:
            self._deadline = None
            self.connection.catalog = self._service.catalog
            self.connection.limits = self._service.limits
            self.link = Link(self.connection, self._handshake.identity, self)
            for handler in self._service.handlers:
                handler.authenticated(self.link)

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
        self._expect(self._service.bounds.linger_seconds, error)
        self._watch()

    def _fail(self, error: WireError | None) -> None:
        self.over = True
        self._service.drop(self, error)

    def _expect(self, seconds: float, verdict: WireError | None) -> None:
        self._deadline = self._service.clock.now() + seconds
        self._verdict = verdict

    def _watch(self) -> None:
        events = 0 if self.over else selectors.EVENT_READ
        if self.connection.wants_write:
            events |= selectors.EVENT_WRITE
        if events != self._events:
            self._events = events
            self._service.watch(self, events)
