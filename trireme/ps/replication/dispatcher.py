"""Routes the messages of the connections about one shard's replica to it. Without I/O.

The handshake of a connection has proven which task is at the other end, and the dispatcher gives
every message to the shard as that task's: a worker's request with the worker and its incarnation,
another server's with its shard's number. It refuses a message that the task's role may not send.

The server and the simulator own the connections, and drive this same object.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from trireme.errors import FrameError
from trireme.ps.messages import FromAnyone, FromServer, FromWorker
from trireme.ps.shard.instructions import Send
from trireme.ps.shard.participants import Participant
from trireme.ps.shard.shard import Shard
from trireme.wire.handshake import Identity
from trireme.wire.message import Message


class AuthenticatedLink(Protocol):
    """What the dispatcher reads of a connection."""

    identity: Identity  # the peer's, as the handshake has proven it
    # In the order in which connections are made, not in that of their first messages. A process
    # makes another one only when it has given up the one before.
    number: int


_S = TypeVar("_S", bound=AuthenticatedLink)


class Dispatcher(Generic[_S]):
    """Routes the messages of the connections about one shard's replica to it."""

    def __init__(self, shard: Shard) -> None:
        # the job's epoch: messages of tasks that have joined another, or none, are refused. None
        # where epochs are not checked.
        self.epoch: str | None = None
        self.shard = shard
        self.speakers: dict[int, _S] = {}  # the connections to the primaries of other shards
        # The last message to each, for a new connection: it tells all that those before have told.
        self._last_sent: dict[int, FromServer] = {}
        # The connection that each process uses, and the number of the newest that it has used.
        self._speaking: dict[Identity, _S] = {}
        self._newest: dict[Identity, int] = {}

    def speaks(self, link: _S, shard: int) -> list[FromServer]:
        """Takes a connection to another shard's primary; returns what to send again."""
        self.speakers[shard] = link
        return self.last_sent(shard)

    def admit(self, link: _S, message: Message) -> _S | None:
        """Admits a message, or not; returns the connection to close for it, if there is one.

        That is the connection that the same process used before: an answer over it would be lost.
        Or it is this connection, if the process has used a later one since: its message is old, and
        is not admitted.
        """
        superseded, identity = None, link.identity
        if self._speaking.get(identity) is not link:
            if self.epoch not in (None, identity.epoch) and identity.role != "observer":
                raise FrameError(f"{identity.task} has not joined this start of the job")
            superseded = self._supersede(link)
        _check_role(identity, message)
        return superseded

    def sender(self, link: _S, message: Message) -> Participant:
        """Returns the task that an admitted message is from; or the shard, as `worker`."""
        if not isinstance(message, FromServer):
            return Participant(link.identity.index, link.identity.incarnation)
        shard = next((shard for shard, other in self.speakers.items() if other is link), None)
        if shard is None:
            raise FrameError(
                f"{link.identity.task} may not speak as a server over this connection: only "
                "connections between the primaries of shards serve for that"
            )
        return Participant(shard, 0)

    def link_for(self, word: Send) -> _S | None:
        """Returns the connection over which to send a message to another shard, if there is one.

        If there is none, `speaks` returns the message when there is one.
        """
        assert isinstance(word.message, FromServer)
        self._last_sent[word.shard] = word.message
        return self.speakers.get(word.shard)

    def last_sent(self, shard: int) -> list[FromServer]:
        return [self._last_sent[shard]] if shard in self._last_sent else []

    def closed(self, link: _S) -> None:
        if self._speaking.get(link.identity) is link:
            del self._speaking[link.identity]
        for shard in [shard for shard, other in self.speakers.items() if other is link]:
            del self.speakers[shard]

    def _supersede(self, link: _S) -> _S | None:
        """Returns the connection of a process that another one replaces, if any; see `admit`."""
        identity = link.identity
        if not identity.incarnation:
            return None  # an observer, or a server: several may use one name
        if link.number < self._newest.get(identity, 0):
            return link
        before = self._speaking.get(identity)
        self._newest[identity], self._speaking[identity] = link.number, link
        return before


def _check_role(identity: Identity, message: Message) -> None:
    if isinstance(message, FromAnyone):
        return
    kind = type(message).__name__
    if not isinstance(message, (FromWorker, FromServer)):
        raise FrameError(f"a server is not asked {kind}")
    role = "worker" if isinstance(message, FromWorker) else "ps"
    if identity.role != role:
        raise FrameError(f"{identity.task} may not say {kind}: only a task of role {role} may")
