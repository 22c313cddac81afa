"""Who says what to a server, and where it goes: what of a server is more than its shard. Pure.

The secret of a job proves that a process belongs to it, and the handshake which task it is. What
comes over a connection is that task's: a worker's requests reach the shard with the worker and the
incarnation of the handshake, and what another server says with its index. A message of another role
is refused.

Connections come in as they are, and are only told apart here; the server and the simulator, which
own them, drive this same object.

    event     what it is                                  what follows
    opened    a peer has proven who it is                 what it is told at once
    admit     something has come over a connection        the connection that is closed for it
    happen    what was admitted happens to the shard      the shard's instructions
    told      another server is to be told something      the connection to it, if there is one
    closed    a connection is gone                        whether it was that to server 0
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from trireme.errors import FrameError
from trireme.ps.messages import (
    Attach,
    Collect,
    Drain,
    FromAnyone,
    FromServer,
    FromWorker,
    Lease,
    Pull,
    Push,
    Retire,
    SetEnd,
    Share,
    Status,
    StopJob,
)
from trireme.ps.server_messages import (
    LastPushes,
    PushesCommitted,
    PushesStaged,
    RoundClose,
    RoundReady,
)
from trireme.ps.shard.instructions import Instruction, Send
from trireme.ps.shard.participants import Participant
from trireme.ps.shard.shard import Shard
from trireme.ps.snapshot_messages import Cut, Freeze, Load, Thaw
from trireme.wire.handshake import Identity
from trireme.wire.message import Message

__all__ = ["Dispatcher", "Speaker"]


class Speaker(Protocol):
    """A connection, as far as it matters here.

    Attributes:
        identity: who the peer has proven to be.
        opened_here: whether this process has made the connection, and not the peer.
    """

    identity: Identity
    opened_here: bool


_S = TypeVar("_S", bound=Speaker)


class Dispatcher(Generic[_S]):
    """Knows the connections of one server, and leads what they bring to its shard.

    Args:
        shard: the server's.

    Attributes:
        epoch: which start of the job this is; what tasks of another, or of none, say is refused.
            None where that is not checked.
    """

    def __init__(self, shard: Shard) -> None:
        self.epoch: str | None = None
        self._shard = shard
        self._servers: dict[int, _S] = {}
        self._untold: dict[int, Message] = {}  # the last word to each, for a new connection
        # What each process speaks over. Connections are numbered as they come: a process makes
        # another one only when it has given up the one before.
        self._made = 0
        self._numbers: dict[_S, int] = {}
        self._speaking: dict[Identity, _S] = {}
        self._newest: dict[Identity, int] = {}
        self._current: set[_S] = set()  # those in `_speaking`: quicker to look up
        self._requests: Mapping[type[Message], Callable[..., list[Instruction]]] = {
            StopJob: shard.stop,
            SetEnd: shard.set_end,
            Collect: shard.collect,
            Drain: shard.drain,
            Freeze: shard.freeze,
            Cut: shard.cut,
            Thaw: shard.thaw,
            Status: shard.status,
        }
        self._of_participants: Mapping[type[Message], Callable[..., list[Instruction]]] = {
            Attach: shard.attach,
            Pull: shard.pull,
            Lease: shard.lease,
            Retire: shard.retire,
        }
        self._with_payload: Mapping[type[Message], Callable[..., list[Instruction]]] = {
            Load: shard.load,
            Share: shard.share,
        }
        self._words: Mapping[type[Message], Callable[..., list[Instruction]]] = {
            RoundReady: shard.round_ready,
            RoundClose: shard.round_close,
            PushesStaged: shard.staged,
            PushesCommitted: shard.committed,
            LastPushes: shard.last_pushes,
        }

    def opened(self, link: _S) -> Message | None:
        """A peer has proven who it is; returns what it is told at once.

        Another server that can be talked to over this is told again what it was told last.
        """
        self._made += 1
        self._numbers[link] = self._made
        if link.identity.role != "ps" or not self._leads(link):
            return None
        self._servers[link.identity.index] = link
        return self._untold.get(link.identity.index)

    def _leads(self, link: _S) -> bool:
        """Returns whether one end of a link to another server is server 0, and made by the other.

        Server 0 calls nobody: who calls a server and says that it is `ps:0` is not. Who calls the
        coordinator that server 0 hosts does not call server 0.
        """
        if self._shard.server:
            return link.opened_here and link.identity.index == 0
        return link.identity.index > 0 and link.identity.calls == "ps:0"

    def admit(self, link: _S, message: Message) -> _S | None:
        """Something has come; returns the connection that is to be closed for it.

        That is the one over which the same process spoke before: an answer that went there would be
        lost. Or it is this one, if the process has spoken over a later one: what the network still
        brings over this is old, and does not happen.

        Raises:
            FrameError: the peer may not say this.
        """
        superseded = None
        if link not in self._current:
            self._check_epoch(link.identity)
            superseded = self._supersede(link)
        _check_role(link.identity, message)
        if isinstance(message, FromServer):
            self._check_server(link)
        return superseded

    def happen(
        self, now: float, link: _S, route: object, message: Message, payload: Any = None
    ) -> list[Instruction]:
        """What was admitted happens to the shard.

        Args:
            now: the time.
            link: over which it came: it belongs to the task at the other end.
            route: where the answer goes.
            message: what was said.
            payload: what came with it, as the shard wants it: gradients, tensors, bytes.
        """
        kind, identity = type(message), link.identity
        who = Participant(identity.index, identity.incarnation)
        if isinstance(message, Push):
            return self._shard.push(now, route, who, message, payload)
        if kind in self._words:
            return self._words[kind](now, identity.index, message)
        if kind in self._requests:
            return self._requests[kind](now, route, message)
        if kind in self._of_participants:
            return self._of_participants[kind](now, route, who, message)
        return self._with_payload[kind](now, route, who, message, payload)

    def told(self, word: Send) -> _S | None:
        """Another server is to be told something; returns the connection to it, if there is one.

        Where there is none, it is told when there is one.
        """
        self._untold[word.server] = word.message
        return self._servers.get(word.server)

    def closed(self, link: _S) -> bool:
        """A connection is gone; returns whether it was that to server 0."""
        self._current.discard(link)
        self._numbers.pop(link, None)
        if self._speaking.get(link.identity) is link:
            del self._speaking[link.identity]
        gone = [server for server, other in self._servers.items() if other is link]
        for server in gone:
            del self._servers[server]
        return 0 in gone

    def _check_epoch(self, identity: Identity) -> None:
        """Checks that a task of the job has joined the start of it that this server has.

        Raises:
            FrameError: it has not, or another.
        """
        if self.epoch is None or identity.epoch == self.epoch or identity.role == "observer":
            return
        raise FrameError(f"{identity.task} has not joined this start of the job")

    def _check_server(self, link: _S) -> None:
        """Checks that it is over this link that a server is talked to.

        Raises:
            FrameError: it is not.
        """
        if self._servers.get(link.identity.index) is not link:
            raise FrameError(
                f"{link.identity.task} may not speak as a server over this connection: only "
                "connections of other servers to server 0 serve for that"
            )

    def _supersede(self, link: _S) -> _S | None:
        """Tells which of the connections of a process is done with, if one is; see `admit`."""
        identity, number = link.identity, self._numbers[link]
        if not identity.incarnation:
            return None  # an onlooker, or a server: several of one name may speak
        if number < self._newest.get(identity, 0):
            return link
        before = self._speaking.get(identity)
        self._newest[identity] = number
        self._speaking[identity] = link
        self._current.add(link)
        if before is not None:
            self._current.discard(before)
        return before


def _check_role(identity: Identity, message: Message) -> None:
    """Checks that a task of this role may say a message to a server.

    Raises:
        FrameError: it may not.
    """
    if isinstance(message, FromAnyone):
        return
    kind = type(message).__name__
    if not isinstance(message, (FromWorker, FromServer)):
        raise FrameError(f"a server is not asked {kind}")
    role = "worker" if isinstance(message, FromWorker) else "ps"
    if identity.role != role:
        raise FrameError(f"{identity.task} may not say {kind}: only a task of role {role} may")
