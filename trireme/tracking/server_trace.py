"""The trace of one server: what it did when, recorded while a task traces the job.

Notes are kept after the trace has ended: workers trace the same steps, and one may have made them
before another begins. The reader leaves out notes of another time.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping
from typing import ClassVar, Literal

import msgspec

from trireme.cluster.view import View
from trireme.errors import WireError
from trireme.ps.client.lanes import ClientOptions
from trireme.ps.dialing import dial
from trireme.ps.server.handler import ShardHandler
from trireme.ps.server.service import ServerPart
from trireme.wire.connection import Connection, Incoming
from trireme.wire.handshake import HANDSHAKE_TIMEOUT
from trireme.wire.message import Catalog, Message
from trireme.wire.service import Link

_log = logging.getLogger(__name__)

_MOST = 200_000  # the most notes that are kept; the oldest are dropped

Action = Literal["start", "read"]


class Trace(Message, frozen=True, array_like=True):
    """Begins a trace of the server, while the connection lasts, or asks for its notes.

    Answered by `Traced`.
    """

    kind: ClassVar[int] = 112
    action: Action


class Traced(Message, frozen=True, array_like=True):
    """The answer to `Trace`. Payload: the notes as JSON, if they were asked for."""

    kind: ClassVar[int] = 113
    offset: float  # what to add to the server's monotonic clock for its time of day, in seconds


class Note(msgspec.Struct, frozen=True, array_like=True):
    """One thing that a server did."""

    name: str  # the type of the message that was handled, or `apply`
    # the times, in seconds on the server's monotonic clock
    began: float
    ended: float
    peer: str = ""  # the task that sent the message; "" for `apply`
    step: int = 0  # the global step that was made; 0 for a message


class Tracer:
    """Takes notes of what a server does, while any connection has begun a trace."""

    messages: tuple[type[Message], ...] = (Trace, Traced)

    def __init__(self, handler: ShardHandler) -> None:
        self._handler = handler
        self._wanted_by: set[Link] = set()
        self._notes: deque[Note] = deque(maxlen=_MOST)

    def authenticated(self, link: Link) -> None:
        """Does nothing: a task that traces says so."""

    def received(self, link: Link, incoming: Incoming) -> None:
        """Begins a task's trace, or sends it the notes."""
        if incoming.message == Trace("start"):
            self._wanted_by.add(link)
            self._handler.note = self._note
        read = incoming.message == Trace("read")
        notes = [msgspec.json.encode(list(self._notes))] if read else []
        link.offer(Traced(time.time() - time.monotonic()), notes, sequence=incoming.sequence)

    def closed(self, link: Link, error: WireError | None) -> None:
        self._wanted_by.discard(link)
        if not self._wanted_by:
            self._handler.note = None

    def tick(self, now: float) -> None:
        """Does nothing: time changes nothing here."""

    def _note(self, name: str, began: float, ended: float, peer: str, step: int) -> None:
        self._notes.append(Note(name, began, ended, peer, step))


TRACER = ServerPart(Tracer)


class ServerTraces:
    """A task's connections to the servers that it traces.

    Monitoring must not end a job: a server that cannot be reached is left out.
    """

    def __init__(self, options: ClientOptions, view: View) -> None:
        self._connections: dict[int, Connection] = {}
        primaries = {shard.primary for shard in view.shards}
        for entry in view.servers:
            index = entry.index
            if primaries and index not in primaries:
                continue
            try:
                self._connections[index] = dial(
                    entry,
                    options.identity,
                    options.secret,
                    local=False,
                    seconds=HANDSHAKE_TIMEOUT,
                    certificates=options.certificates,
                    catalog=Catalog(Tracer.messages),
                )
            except WireError as error:
                _log.warning("the trace lacks ps:%d: %s", index, error)

    def ask(self, action: Action) -> Mapping[int, tuple[float, tuple[Note, ...]]]:
        """Returns of each server what to add to its times for its time of day, and its notes."""
        traces = {}
        for index, connection in [*self._connections.items()]:
            try:
                connection.send(Trace(action), timeout=HANDSHAKE_TIMEOUT)
                answer = connection.receive(timeout=HANDSHAKE_TIMEOUT)
            except WireError as error:
                _log.warning("the trace lacks ps:%d: %s", index, error)
                self._connections.pop(index).close()
                continue
            assert isinstance(answer.message, Traced)
            said = b"".join(answer.payload)
            notes = msgspec.json.decode(said, type=tuple[Note, ...]) if said else ()
            traces[index] = answer.message.offset, notes
        return traces

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
