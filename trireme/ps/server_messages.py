"""The messages between the primaries of shards: shard 0 decides, the others report what they hold.

The sender of a message is known from the handshake of its connection.
"""

from __future__ import annotations

from typing import ClassVar

from trireme.ps.messages import FromServer, Pairs
from trireme.wire.message import Number


class RoundReady(FromServer, frozen=True, array_like=True):
    """To shard 0: the updates for a round that this shard holds, and keeps until it is closed.

    Attributes:
        step: the global step on top of which the round is.
        members: pairs (worker, incarnation).
        measured: the members whose mean gradient `square` is of; none where nothing is clipped.
        square: the squared L2 norm of this shard's part of that mean.
    """

    kind: ClassVar[int] = 96
    step: Number
    members: Pairs
    measured: Pairs
    square: float


class RoundClose(FromServer, frozen=True, array_like=True):
    """From shard 0: the members whose updates make the round, and the factor for their mean.

    `members` are pairs (worker, incarnation). A `scale` of -1 only proposes them: each shard
    answers with the squared norm of its part of their mean.
    """

    kind: ClassVar[int] = 97
    step: Number
    members: Pairs
    scale: float


class PushesStaged(FromServer, frozen=True, array_like=True):
    """To shard 0: the asynchronous pushes that this shard has staged, and keeps until decided.

    Attributes:
        known: how many decisions of shard 0 it has received.
        pushes: triples (worker, incarnation, sequence).
    """

    kind: ClassVar[int] = 98
    known: Number
    pushes: tuple[tuple[Number, Number, Number], ...]


class PushesCommitted(FromServer, frozen=True, array_like=True):
    """From shard 0: its decisions about asynchronous pushes, which all follow in this order.

    It never decides other pushes of workers that are not in its view.

    Attributes:
        first: the number of the first of these decisions, counted from 0.
        pushes: worker, incarnation, sequence, and whether the push is applied; else it is stale.
        view: the number of the view that shard 0 has taken.
    """

    kind: ClassVar[int] = 99
    first: Number
    pushes: tuple[tuple[Number, Number, Number, bool], ...]
    view: Number


class ShardFrozen(FromServer, frozen=True, array_like=True):
    """To shard 0: this shard decides nothing any more, as the shards are divided anew.

    Attributes:
        view: the number of the view that has announced it.
        step: the global step of the values.
        decided: pairs (worker, sequence): the last decided push of each.
    """

    kind: ClassVar[int] = 106
    view: Number
    step: Number
    decided: Pairs


class StopAt(FromServer, frozen=True, array_like=True):
    """From shard 0: the cut at which every shard stops; see `ShardFrozen`.

    Attributes:
        view: as there.
        step: the largest step of all shards.
        decided: pairs (worker, sequence): the largest of all shards.
    """

    kind: ClassVar[int] = 107
    view: Number
    step: Number
    decided: Pairs
