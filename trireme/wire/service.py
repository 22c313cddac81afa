"""One thread that serves many connections: accepts, authenticates, hands messages to handlers.

The kind of a message picks the handler, so that a parameter server and a coordinator can share
one listener. Handlers run in the loop's thread and must not block. A peer that misbehaves is
closed and logged, and the others are served on; an exception in a handler is a bug of ours: it is
logged and ends `run`.
"""

from __future__ import annotations

import logging
import socket
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

from trireme.clock import Clock, MonotonicClock
from trireme.errors import AuthenticationError, ConnectionBroken, PeerClosed, WireError
from trireme.wire.connection import Connection, Incoming
from trireme.wire.handshake import HANDSHAKE_CATALOG, Identity, ServerHandshake
from trireme.wire.link import Bounds, Link, Peer
from trireme.wire.message import HANDSHAKE_LIMITS, Catalog, Limits, Message
from trireme.wire.polling import READABLE, Poller
from trireme.wire.refusals import Refusals
from trireme.wire.transport import Listener, Stream

__all__ = ["Bounds", "Handler", "Link", "Service"]

_log = logging.getLogger(__name__)

_TURN_ACCEPTS = 32
_DEFAULT_LIMITS = Limits()
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
        epoch: str | None = "",
        serves: Collection[str] = (),
        clock: Clock | None = None,
        tick_seconds: float = 0.1,
        limits: Limits = _DEFAULT_LIMITS,
        bounds: Bounds = _DEFAULT_BOUNDS,
        beside: Sequence[Listener] = (),
    ) -> None:
        """Prepares to serve; nothing is accepted before `run`.

        Args:
            listener: where peers connect to.
            handlers: who serves them.
            job: the job's id, which peers must name.
            secret: the job's, which they must prove to know.
            epoch: which start of the job this is; peers that name one must name the same. "" while
                this process has not joined, see `epoch`; None for handlers that check it.
            serves: the tasks that this process is, such as `ps:0`: peers must mean one of them;
                empty to take peers that mean any.
            clock: for ticks and deadlines.
            tick_seconds: how often handlers are ticked.
            limits: the largest frame of an authenticated peer.
            bounds: what is borne of peers otherwise.
            beside: where peers may connect to besides.

        Raises:
            ValueError: two handlers want the same kind of message.
        """
        self.catalog = Catalog(kind for handler in handlers for kind in handler.messages)
        self.limits = limits
        self.bounds = bounds
        self.clock = clock or MonotonicClock()
        self.handlers = tuple(handlers)
        self.handler_of = {message: handler for handler in handlers for message in handler.messages}
        self.refusals = Refusals()
        self._listeners = (listener, *beside)
        self.epoch = epoch  # any thread may set it, once this process has joined
        self._job = job
        self._secret = secret
        self._serves = serves
        self._tick_seconds = tick_seconds
        self._peers: dict[Peer, None] = {}  # in the order in which they came
        self._ready: deque[Peer] = deque()
        self._departed: deque[tuple[Link, WireError | None]] = deque()
        self._calls: deque[Callable[[], object]] = deque()
        self._stopping = False
        self._accepting = False
        self._door, self._bell = socket.socketpair()
        self._door.setblocking(False)
        self._bell.setblocking(False)
        self._poller = Poller()
        self._poller.register(self._door.fileno(), READABLE, self._woken)

    @property
    def address(self) -> str:
        """Where it listens."""
        return self._listeners[0].address

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
        happened = self._poller.dispatch(timeout)
        if self._calls or self._ready or self._departed:
            self._catch_up()
        return happened

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
        self.refusals.tick(now)
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
        for listener in self._listeners:
            listener.close()
        for peer in list(self._peers):
            peer.finish()
        pause = min(self._tick_seconds, self.bounds.linger_seconds)
        quiet = 0.0  # counted too, so that it ends under a clock that stands still
        while self._peers and quiet < self.bounds.linger_seconds:
            quiet = 0.0 if self._turn(pause) else quiet + pause
            self._sweep(self.clock.now())
        for peer in list(self._peers):
            self.drop(peer, None)
        self._tell_departed()

    def _close(self) -> None:
        for peer in list(self._peers):
            self.drop(peer, None)
        self._poller.close()
        for listener in self._listeners:
            listener.close()
        self._door.close()
        self._bell.close()

    # Peers -------------------------------------------------------------------------------------

    def _listen(self) -> None:
        if not self._accepting:
            for listener in self._listeners:
                accept = partial(self._accept, listener)
                self._poller.register(listener.fileno(), READABLE, accept)
            self._accepting = True

    def _deafen(self) -> None:
        if self._accepting:
            for listener in self._listeners:
                self._poller.unregister(listener.fileno())
            self._accepting = False

    def _accept(self, listener: Listener, mask: int) -> None:
        for _ in range(_TURN_ACCEPTS):
            try:
                stream = listener.accept()
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
        connection = Connection(
            stream, HANDSHAKE_CATALOG, limits=HANDSHAKE_LIMITS, clock=self.clock
        )
        handshake = ServerHandshake(
            self._job,
            self._secret,
            self.epoch,
            serves=self._serves,
            called=stream.called,
        )
        self._register(Peer(self, connection, handshake))

    def adopt(self, connection: Connection, identity: Identity) -> Link:
        """Serves a connection that this process opened and that is authenticated already.

        To be called in the loop's thread; see `call_soon`. The handlers are told of the link as
        of any other.

        Args:
            connection: nobody else may use it from now on.
            identity: who is at the other end.
        """
        peer = Peer(self, connection)
        self._register(peer)
        self.resume(peer)  # something may have been read ahead of this
        return peer.welcome(identity)

    def _register(self, peer: Peer) -> None:
        self._peers[peer] = None
        self._poller.register(peer.connection.fileno(), READABLE, peer.ready)

    def watch(self, peer: Peer, events: int) -> None:
        """Waits for these events of a peer from now on."""
        self._poller.modify(peer.connection.fileno(), events)

    def resume(self, peer: Peer) -> None:
        """Lets a peer receive again in the next turn, whatever its descriptor says."""
        self._ready.append(peer)

    def drop(self, peer: Peer, error: WireError | None) -> None:
        """Closes a peer; the handlers are told at the end of the turn."""
        if peer not in self._peers:
            return
        del self._peers[peer]
        self._poller.unregister(peer.connection.fileno())
        peer.connection.close()
        if peer.link is not None:
            self._departed.append((peer.link, error))
        if error is not None:
            departing = peer.link is not None and peer.link.departing
            routine = isinstance(error, PeerClosed) or (
                departing and isinstance(error, ConnectionBroken)
            )
            reason = f"closed the connection of {peer.name}: {error}"
            if routine:
                _log.debug("%s", reason)
            else:
                self.refusals.say(self.clock.now(), reason)
