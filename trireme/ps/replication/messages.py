"""The messages that open connections to a shard's replicas, and that replicate a shard; and all.

Every connection to a parameter server begins with `ConnectToShard`, `ConnectToLeader` or
`FollowPrimary`, after the handshake: a server may hold replicas of several shards.
"""

from __future__ import annotations

from typing import ClassVar

from trireme.cluster.view import View
from trireme.ps import lending_messages, messages, snapshot_messages
from trireme.ps.leader import decisions
from trireme.ps.messages import FromAnyone, FromServer, Pairs
from trireme.ps.snapshot_messages import TensorSpec
from trireme.wire.message import Catalog, Index, Message, Number


class ConnectToShard(FromAnyone, frozen=True, array_like=True):
    """The first message of a task that asks something: what follows is for this shard.

    The server closes the connection where it is not the primary of that shard, in that generation.
    """

    kind: ClassVar[int] = 100
    shard: Number
    generation: Number


class ConnectToLeader(FromServer, frozen=True, array_like=True):
    """The first message of the primary of a shard to the primary of shard 0."""

    kind: ClassVar[int] = 101
    shard: Number  # the shard that speaks
    generation: Number  # its generation


class Pulse(FromServer, frozen=True, array_like=True):
    """The primary of shard 0 to those of other shards: it lives."""

    kind: ClassVar[int] = 128


class FollowPrimary(FromServer, frozen=True, array_like=True):
    """The first message of a backup, or of a joining replica, to the primary of its shard."""

    kind: ClassVar[int] = 102
    shard: Number  # the shard
    generation: Number  # its generation
    position: Number  # the position of the last entry that it has
    began: Number  # the number of the view in which it has begun; 0 where it has no state
    incarnation: Number  # this start of the server
    since: Number = 0  # that of the last entry; see `Replicate`
    lacks: Number = 0  # how many of the shard's last slots it has no extra values of


class Fill(FromServer, frozen=True, array_like=True):
    """The state with which a generation began. Payload: its tensors, then the bytes of its topics.

    Extra values are not in it: they follow in `FillExtra`.
    """

    kind: ClassVar[int] = 103
    view: View  # the view in which the primary has begun
    state: bytes  # an encoded `trireme.ps.shard.quiet_state.QuietState`; empty where the shard was
    tensors: tuple[TensorSpec, ...]  # the tensors of the payload


class FillExtra(FromServer, frozen=True, array_like=True):
    """The extra values of some slots, as they are after the entry before. Payload: its tensors.

    A replica that is filled leaves out what entries say of slots that have not come yet.
    """

    kind: ClassVar[int] = 127
    slots: tuple[Number, Number]  # the first of the slots, and the one after the last
    tensors: tuple[TensorSpec, ...]  # the tensors of the payload


class Replicate(FromServer, frozen=True, array_like=True):
    """One entry of a shard's log. Payload: the event's; none where it lies in lent memory."""

    kind: ClassVar[int] = 104
    position: Number  # 1 for the first entry of the generation, then one more with each
    now: float  # the time of the event, by the clock of the primary
    index: Index  # the index of the task that it is from, or the number of the shard
    incarnation: Number  # that task's
    event_kind: int  # the kind of the event's message
    event: bytes  # the message, encoded
    # the number of the view since which its sender is the primary. Two primaries, one after the
    # other, may give one position to different entries, of which at most one was confirmed.
    since: Number = 0
    memory: Number = 0  # the identity of the memory in which the payload lies; 0 where it follows
    places: Pairs = ()  # the payload's (offset, length) there, in bytes


class Replicated(FromServer, frozen=True, array_like=True):
    """The answer of a replica to entries: it has all of them up to this position."""

    kind: ClassVar[int] = 105
    position: Number  # the position
    lacks: Number = 0  # see `FollowPrimary`


class Borrows(FromServer, frozen=True, array_like=True):
    """The memory that workers of one host lend to the server of a replica, by identity.

    The primary names a payload that lies there, and does not send it.
    """

    kind: ClassVar[int] = 109
    memories: tuple[Number, ...]


OPENERS = (ConnectToShard, ConnectToLeader, FollowPrimary)  # the first of a connection

_KINDS = [
    kind
    for module in (messages, lending_messages, snapshot_messages, decisions)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Message) and kind.__module__ == module.__name__
]
PS_MESSAGES: tuple[type[Message], ...] = (
    *(kind for kind in _KINDS if kind.kind),  # the base classes have none
    *(*OPENERS, Pulse, Fill, FillExtra, Replicate, Replicated, Borrows),
)
PS_CATALOG = Catalog(PS_MESSAGES)  # all that a connection to a parameter server may carry
