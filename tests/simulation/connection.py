"""One end of a simulated connection, as the handlers of a service see it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from tests.simulation.process import Process
from trireme.wire.connection import Incoming
from trireme.wire.handshake import Identity
from trireme.wire.message import Message

Payload = Sequence[bytes]
"""What follows a message."""

Deliver = Callable[[Message, int, Payload], None]
"""Brings a message with its sequence and its payload to the other end."""


class End:
    """Stands in for `trireme.wire.service.Link`.

    Args:
        process: whose end it is.
        handler: serves it.
        identity: who is at the other end.
        deliver: sends to the other end.
        hang_up: closes the connection, once what was sent before has arrived.
        opened_here: whether this process has made the connection.
    """

    def __init__(
        self,
        process: Process,
        handler: Any,
        identity: Identity,
        deliver: Deliver,
        hang_up: Callable[[], None],
        *,
        opened_here: bool = False,
    ) -> None:
        self.identity = identity
        self.opened_here = opened_here
        self.connection = SimpleNamespace(destination=None, lending=None, unsent=0, bytes_sent=0)
        self.context: Any = None
        self.departing = False
        self.closed = False
        self._process = process
        self._handler = handler
        self._deliver = deliver
        self._hang_up = hang_up
        self._known = False  # whether the handler knows that it is closed
        handler.authenticated(self)

    # -- for handlers -----------------------------------------------------------------------------

    def offer(self, message: Message, payload: Iterable[Any] = (), *, sequence: int = 0) -> bool:
        """Sends a message."""
        if not self.closed:
            self._deliver(message, sequence, [bytes(view) for view in payload])
        return True

    def close(self) -> None:
        """Closes the connection; the handler hears of it at the end of the turn."""
        if not self.closed:
            self.closed = True
            self._hang_up()
            self._process.after(0.0, self._tell)

    # -- for the network --------------------------------------------------------------------------

    def receive(self, message: Message, sequence: int, payload: Payload) -> None:
        """A message has come."""
        if self.closed:
            return
        received: Sequence[memoryview] = ()
        length = sum(map(len, payload))
        if length:
            received = self.connection.destination(message, length)
            _scatter(payload, received)
        self._handler.received(self, Incoming(message, sequence, received, length))

    def broke(self) -> None:
        """The connection is gone, and all has come that it still brought."""
        self.closed = True
        self._tell()

    def _tell(self) -> None:
        if not self._known:
            self._known = True
            self._handler.closed(self, None)


def _scatter(payload: Payload, memory: Sequence[memoryview]) -> None:
    """Copies bytes into memory, as a socket's are received."""
    rest = memoryview(payload[0] if len(payload) == 1 else b"".join(payload))
    for view in memory:
        view[:] = rest[: view.nbytes]
        rest = rest[view.nbytes :]
    assert not rest, "a payload is longer than the memory for it"
