"""The decisions of the leader, and the messages between it and the shards that follow it.

The decisions of a generation of shards are numbered from 0, and every shard carries them out in
this order. So they all apply the same updates, copy the same values and stop at the same point.
Each decision carries the global step of the values after it: the values of a step are the same
ones on every shard.

The sender of a message is known from the handshake of its connection.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from trireme.ps.messages import FromServer, Pairs
from trireme.wire.message import Number

PushId = tuple[Number, Number, Number]  # its worker, that one's incarnation, its sequence

Pushes = Annotated[tuple[PushId, ...], msgspec.Meta(max_length=1 << 16)]


class Apply(msgspec.Struct, frozen=True, array_like=True, tag="apply"):
    """Apply these pushes: those of a round, or one of asynchronous training.

    In synchronous training all others that a shard holds for the same step are stale.
    """

    step: Number  # the global step that they make
    pushes: Pushes  # by worker
    scale: float = 1.0  # the factor for their mean gradient


class Measure(msgspec.Struct, frozen=True, array_like=True, tag="measure"):
    """Report the squared norm of the mean gradient of these pushes, which may make a round."""

    step: Number
    pushes: Pushes


class Cut(msgspec.Struct, frozen=True, array_like=True, tag="cut"):
    """Copy the values for the request of a worker that has this token."""

    step: Number
    worker: Number
    token: Number


class Add(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """Add the parameters of the request of a worker that has this token."""

    step: Number
    worker: Number
    token: Number


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Training has ended: all pushes that are not applied are stale."""

    step: Number


class Divide(msgspec.Struct, frozen=True, array_like=True, tag="divide"):
    """Carry out nothing more in the view of this number: the shards are divided anew."""

    step: Number
    view: Number


class Members(msgspec.Struct, frozen=True, array_like=True, tag="members"):
    """Count only these workers for the staleness bound, at all shards, from now on."""

    step: Number
    workers: Pairs  # pairs (worker, incarnation)


Decision = Apply | Measure | Cut | Add | Stop | Divide | Members


class Held(FromServer, frozen=True, array_like=True):
    """To the leader: what this shard holds, and keeps until the leader has decided about it.

    A push whose worker is out of the job it keeps until the leader has taken that view too: by
    then the leader has decided to apply it, or never will.
    """

    kind: ClassVar[int] = 98
    known: Number  # how many decisions it has received
    pushes: Pushes  # the pushes that it holds
    snapshots: Pairs = ()  # the requests for a snapshot that it holds: pairs (worker, token)
    # the pushes whose mean gradient `square` is of; none where nothing is clipped
    measured: Pushes = ()
    square: float = 0.0  # the squared L2 norm of this shard's part of that mean
    additions: Pairs = ()  # the requests to add parameters that it holds: pairs (worker, token)


class Decided(FromServer, frozen=True, array_like=True):
    """From the leader: its decisions, from the first on that the shard may not have received."""

    kind: ClassVar[int] = 99
    first: Number  # the number of the first of these decisions
    decisions: tuple[Decision, ...]  # the decisions, in their order
    # the number of the view that the leader has taken. It never decides to apply other pushes of
    # workers that are not in this view.
    view: Number
