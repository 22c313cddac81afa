"""One thread that serves many connections: accepts, authenticates, passes messages to handlers.

The type of a message selects the handler. Handlers must not block. The connection of a peer that
breaks the protocol is closed and logged. An exception in a handler is a bug, and ends `run`.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from trireme.errors import (
    AuthenticationError,
    ConnectionBroken,
    CorruptedValues,
    FrameError,
    OutOfMemory,
    PeerClosed,
    ProtocolMismatch,
    WireError,
)
from trireme.wire.clock import Clock, MonotonicClock
from trireme.wire.connection import Connection, Incoming
from trireme.wire.handshake import HANDSHAKE_CATALOG, Denied, Identity, ServerHandshake
from trireme.wire.message import HANDSHAKE_LIMITS, Catalog, Message
from trireme.wire.polling import READABLE, WRITABLE, Poller, Wakeup
from trireme.wire.refusals import Refusals, RefusedHosts, ServiceLimits, network
from trireme.wire.transport import Listener, Stream

if TYPE_CHECKING:
    from typing_extensions import Buffer

_log = logging.getLogger(__name__)

_ACCEPTS_AT_ONCE = 32
_MESSAGES_AT_ONCE = 32  # how many messages of one link are handled before other links'
_DEFAULT_LIMITS = ServiceLimits()
_NOBODY = Identity("", "an unauthenticated peer")


class Link:
    """One connection of a service. Handlers see it once its peer has authenticated.

    Handlers call `offer` and `close`, and may set the connection's `destination` and `lending`.
    """

    def __init__(
        self, service: Service, connection: Connection, handshake: ServerHandshake | None = None
    ) -> None:
        self.identity = _NOBODY  # that the peer has proven
        self.connection = connection
        self.context: Any = None  # of the handler that serves this peer
        self.number = 0  # among the connections of a handler that counts them
        self.authenticated = False
        self.opened_here = handshake is None
        # Whether the peer has announced that it leaves: it need not read what is still sent to it,
        # and a break of its connection is not logged as a warning.
        self.departing = False
        self.closed = False  # or closing
        # Whether its handler waits for confirmations before it offers more, so that the link need
        # not limit what is unsent.
        self.windowed = False
        self.handshake = handshake  # authenticates the peer
        self.events = READABLE  # of the descriptor that the service waits for
        self._service = service
        self._unsent_bytes = service.limits.unsent_bytes
        # When the link is dropped, and the error for that, unless something happens before.
        self._deadline: float | None = None
        self._expiry_error: WireError | None = None
        if handshake is not None:
            seconds = service.limits.handshake_seconds
            error = AuthenticationError(f"it did not authenticate within {seconds:g} s")
            self._set_deadline(seconds, error)

    def __repr__(self) -> str:
        return f"<Link to {self.name}>"

    @property
    def name(self) -> str:
        return f"{self.identity.task} at {self.connection.peer}"

    def taken(self) -> int:
        """Returns how many bytes the connection has taken, if it has to take more; else 0."""
        return self.connection.bytes_sent if self.connection.unsent else 0

    def offer(self, message: Message, payload: Iterable[Buffer] = (), *, sequence: int = 0) -> bool:
        """Sends without blocking; returns whether all was sent. The service sends the rest later.

        A failure does not raise here: `closed` is called later. A closed link drops what comes.
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
            self._set_deadline(self._service.limits.linger_seconds, None)
            self._update_events()
        else:
            self._service.drop(self, None)

    # -- for the service -------------------------------------------------------------------------

    def expire(self, now: float) -> None:
        if self._deadline is not None and now >= self._deadline:
            self.fail(self._expiry_error)

    def admit(self, identity: Identity) -> None:
        self.identity, self.authenticated, self._deadline = identity, True, None

    def flush(self) -> None:
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
        self.closed = True
        self._service.drop(self, error)

    def _cannot_send(self, error: WireError) -> None:
        if self.closed:
            self._service.drop(self, None)
            return
        if self._deadline is None:
            self._set_deadline(self._service.limits.linger_seconds, error)
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
            self._service.poller.modify(self.connection.fileno(), events)


class Handler(Protocol):
    """Handles a set of message types. The service calls every method in its own thread."""

    @property
    def messages(self) -> tuple[type[Message], ...]:
        """The message types that this handler receives and sends. No other handler has them."""

    def authenticated(self, link: Link) -> None:
        """A peer has authenticated. Called on every handler for every link."""

    def received(self, link: Link, incoming: Incoming) -> None:
        """A message of one of this handler's types has arrived. `FrameError` closes the link."""

    def closed(self, link: Link, error: WireError | None) -> None:
        """An authenticated link has closed, with an error if this side did not close it."""

    def tick(self, now: float) -> None:
        """Called about every `tick_seconds` of the service's clock."""


class Service:
    """Accepts connections and serves them in one loop, until it is stopped; see `ServerHandshake`.

    It owns the listeners and the connections, and closes them when `run` ends.
    """

    def __init__(
        self,
        listener: Listener,
        handlers: Sequence[Handler],
        *,
        job: str,
        secret: bytes,
        epoch: str = "",
        serves: Collection[str] = (),
        clock: Clock | None = None,
        limits: ServiceLimits = _DEFAULT_LIMITS,
    ) -> None:
        self.catalog = Catalog(kind for handler in handlers for kind in handler.messages)
        self.listeners = [listener]  # others may be added before `run`
        self.epoch = epoch  # set by any thread, once this process has joined
        self.limits = limits
        self.clock = clock or MonotonicClock()
        self.handlers = tuple(handlers)
        self.refusals = Refusals()
        self.turned: Callable[[], object] = lambda: None  # called after each turn of the loop
        self.turns = 0  # of the loop; any thread may read it
        self._handler_of = {kind: handler for handler in handlers for kind in handler.messages}
        self._refused_hosts = RefusedHosts(limits.tries, limits.try_seconds)
        self._new_handshake = partial(ServerHandshake, job, secret, serves=serves)
        self._links: dict[Link, None] = {}  # in the order of arrival
        self._strangers: dict[Link, None] = {}  # those that have not authenticated
        self._task_networks: Counter[str | None] = Counter()  # of those that have
        self._closed_links: deque[tuple[Link, WireError | None]] = deque()
        self._calls: deque[Callable[[], object]] = deque()
        self._stopping = self._accepting = False
        self._wakeup = Wakeup()
        self.poller = Poller()
        self.poller.register(self._wakeup.fileno(), READABLE, lambda _: self._wakeup.drain())

    @property
    def address(self) -> str:
        return self.listeners[0].address

    # From any thread ---------------------------------------------------------------------------

    def stop(self) -> None:
        """Ends `run` once all offered messages are sent, or time is up. May be repeated."""
        self._stopping = True
        self._wakeup.wake()

    def call_soon(self, function: Callable[[], object]) -> None:
        """Has the loop call a function. A call that is pending when the service ends is dropped."""
        self._calls.append(function)
        self._wakeup.wake()

    # The loop ----------------------------------------------------------------------------------

    def run(self) -> None:
        """Serves until `stop`, then closes all links. What a handler raises ends it."""
        try:
            next_tick = self.clock.now()
            while not self._stopping:
                now = self.clock.now()
                if now >= next_tick:
                    self._accept_connections()
                    for link in list(self._links):
                        link.expire(now)
                    self.refusals.tick(now)
                    for handler in self.handlers:
                        handler.tick(now)
                    next_tick = now + self.limits.tick_seconds
                self._turn(0 if self._closed_links or self._calls else next_tick - now)
            self._linger()
        except (OutOfMemory, CorruptedValues):
            raise  # no error of ours, and the message says all
        except Exception:
            _log.exception("the service at %s ends by an internal error", self.address)
            raise
        finally:
            for link in list(self._links):
                self.drop(link, None)
            self.poller.close()
            for listener in self.listeners:
                listener.close()
            self._wakeup.close()

    def _turn(self, timeout: float) -> bool:
        happened = False
        for handle, mask in self.poller.events(timeout):
            handle(mask)
            happened = True
        for _ in range(len(self._calls)):  # what is added meanwhile is left to the next turn
            self._calls.popleft()()
        self._report_closed_links()
        self.turned()
        self.turns += 1
        return happened

    def _report_closed_links(self) -> None:
        for _ in range(len(self._closed_links)):
            link, error = self._closed_links.popleft()
            for handler in self.handlers:
                handler.closed(link, error)

    def _linger(self) -> None:
        self._stop_accepting()
        for listener in self.listeners:
            listener.close()
        for link in list(self._links):
            link.close()
        linger = self.limits.linger_seconds
        pause = min(self.limits.tick_seconds, linger)
        quiet = 0.0  # counted, so that lingering ends even if the clock stands still
        while self._links and quiet < linger:
            quiet = 0.0 if self._turn(pause) else quiet + pause
            for link in list(self._links):
                link.expire(self.clock.now())
        for link in list(self._links):
            self.drop(link, None)
        self._report_closed_links()

    # Peers -------------------------------------------------------------------------------------

    def _accept_connections(self) -> None:
        if not self._accepting:
            for listener in self.listeners:
                accept = partial(self._accept, listener)
                self.poller.register(listener.fileno(), READABLE, accept)
            self._accepting = True

    def _stop_accepting(self) -> None:
        if self._accepting:
            for listener in self.listeners:
                self.poller.unregister(listener.fileno())
            self._accepting = False

    def _accept(self, listener: Listener, mask: int) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                stream = listener.accept()
            except WireError as error:
                _log.warning("%s; trying again at the next tick", error)
                self._stop_accepting()
                return
            if stream is None:
                return
            self._admit(stream)

    def _admit(self, stream: Stream) -> None:
        full = len(self._links) >= self.limits.connections
        # A host that was refused too often is listened to where one of the job's tasks is on it.
        admitted = self._refused_hosts.admits(self.clock.now(), stream.peer)
        if full or not (admitted or self._task_networks[network(stream.peer)] > 0):
            stream.close()
            why = f"{len(self._links)} connections are open" if full else "it was refused too often"
            self.refusals.log(self.clock.now(), f"did not listen to {stream.peer}: {why}")
            return
        if len(self._strangers) >= self.limits.unauthenticated:
            longest, count = next(iter(self._strangers)), len(self._strangers)
            reason = f"{count} connections are unauthenticated, this one the longest"
            self.drop(longest, AuthenticationError(reason))
        connection = Connection(
            stream, HANDSHAKE_CATALOG, limits=HANDSHAKE_LIMITS, clock=self.clock
        )
        handshake = self._new_handshake(self.epoch, called=stream.called)
        self._register(Link(self, connection, handshake))

    def adopt(self, connection: Connection, identity: Identity) -> Link:
        """Serves an authenticated connection that this process opened. In the loop's thread."""
        link = Link(self, connection)
        self._register(link)
        self._calls.append(partial(self._receive, link, READABLE))  # bytes may have been read
        self._welcome(link, identity)
        return link

    def _register(self, link: Link) -> None:
        self._links[link] = self._strangers[link] = None
        self.poller.register(link.connection.fileno(), READABLE, partial(self._receive, link))

    def _receive(self, link: Link, mask: int) -> None:
        if link.events & WRITABLE and mask != READABLE:
            link.flush()
        if not link.events & READABLE or mask == WRITABLE:
            return
        connection = link.connection
        for _ in range(_MESSAGES_AT_ONCE):
            if link.closed:
                return
            try:
                incoming = connection.poll()
            except WireError as error:
                if isinstance(error, ProtocolMismatch) and not link.authenticated:
                    link.offer(Denied("version"))  # other strangers get no answer
                link.fail(error)
                return
            if incoming is None:
                if connection.stream.pending:
                    continue  # the descriptor does not announce it
                return
            if not link.authenticated:
                self._shake_hands(link, incoming.message)
            else:
                try:
                    self._handler_of[type(incoming.message)].received(link, incoming)
                except FrameError as error:
                    link.fail(error)
            if not connection.buffered:
                return
        self._calls.append(partial(self._receive, link, READABLE))

    def _shake_hands(self, link: Link, message: Message) -> None:
        handshake = link.handshake
        assert handshake is not None  # else it was adopted, and has authenticated
        handshake.certified = link.connection.stream.certified
        link.offer(handshake.answer(message))
        if handshake.denied:
            if not handshake.early:
                self._refuse(link, f"denied {link.name}: {handshake.denied}")
            link.close()
        elif handshake.identity and not link.closed:
            self._welcome(link, handshake.identity)

    def _welcome(self, link: Link, identity: Identity) -> None:
        link.connection.catalog, link.connection.limits = self.catalog, self.limits.frame
        link.admit(identity)
        del self._strangers[link]
        self._task_networks[network(link.connection.stream.peer)] += 1
        for handler in self.handlers:
            handler.authenticated(link)

    def drop(self, link: Link, error: WireError | None) -> None:
        """Closes a link. The handlers' `closed` is called at the end of the turn."""
        if link not in self._links:
            return
        del self._links[link]
        self.poller.unregister(link.connection.fileno())
        link.connection.close()
        if link.authenticated:
            host = network(link.connection.stream.peer)
            self._task_networks[host] -= 1
            if not self._task_networks[host]:
                del self._task_networks[host]
            self._closed_links.append((link, error))
        else:
            del self._strangers[link]
        reason = f"closed the connection of {link.name}: {error}"
        leaves = link.departing and isinstance(error, ConnectionBroken)
        if leaves or isinstance(error, PeerClosed):
            _log.debug("%s", reason)
        elif error is not None:
            self._refuse(link, reason)

    def _refuse(self, link: Link, reason: str) -> None:
        now = self.clock.now()
        self.refusals.log(now, reason)
        if not link.authenticated:
            self._refused_hosts.refused(now, link.connection.stream.peer)
