"""The messages of a consistent copy: a cut over all servers, and values that are loaded.

All servers are frozen, then asked for a cut, which each answers with a `Snapshot`. `Load` gives a
server such a state back.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from trireme.ps.messages import FromWorker, Pairs, Span, WorkerProgress
from trireme.wire.message import Message, Name, Number

Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]
"""How many examples a data set has."""


class Freeze(FromWorker, frozen=True, array_like=True):
    """Asks the server to apply nothing until `Cut` and its snapshot, or `Thaw`."""

    kind: ClassVar[int] = 80
    token: Number


class Frozen(Message, frozen=True, array_like=True):
    """The answer to `Freeze`: the last decided sequence of each worker (pairs) and the step.

    `changes_after` is the step after which the server knows all changes of its tables. `view` is
    the server's. Sequences count the pushes of one start of a worker, so that those of
    several servers can be compared only within one view.
    """

    kind: ClassVar[int] = 81
    step: Number
    decided: Pairs
    view: Number = 0
    changes_after: Number = 0


class Cut(FromWorker, frozen=True, array_like=True):
    """Asks for a copy, once each worker's pushes are decided up to the given sequence.

    Attributes:
        token: the one of `Freeze`.
        step: the largest step that any server answered in `Frozen`.
        decided: pairs (worker, sequence): the largest that any server answered in `Frozen`.
        state: whether the copy includes the optimizer's state and the tables, besides the values.
        since: the step after which changes of the tables are wanted; -1 for all rows.
    """

    kind: ClassVar[int] = 82
    token: Number
    step: Number
    decided: Pairs
    state: bool
    since: Annotated[int, msgspec.Meta(ge=-1, le=1 << 62)] = -1


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a snapshot's payload.

    Attributes:
        key: `values`, `average`, or `state/NAME` with the optimizer's name for it.
        dtype: the dtype's name.
        vector: which flat vector (its dtype's name) it is a part of.
        start, stop: the elements of that vector; for a scalar, those that it holds for.
        group: the parameter group, for a scalar; -1 otherwise.
    """

    key: Name
    dtype: Name
    vector: Name
    start: Number
    stop: Number
    group: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 16)] = -1


class Snapshot(Message, frozen=True, array_like=True):
    """The answer to `Cut`. Payload: the tensors, one after the other.

    Attributes:
        step: the global step.
        tensors: the tensors of the payload.
        workers: the exactly-once table.
        consumed: the examples that are in the parameters (shard 0).
        sizes: how many examples each data set has (shard 0).
        orders: the fingerprint of each data set's order (shard 0).
        view: the server's.
        since: as in the `Cut`.
    """

    kind: ClassVar[int] = 83
    step: Number
    tensors: tuple[TensorSpec, ...]
    workers: tuple[WorkerProgress, ...]
    consumed: tuple[Span, ...]
    sizes: dict[Name, Count] = msgspec.field(default_factory=dict)
    orders: dict[Name, Number] = msgspec.field(default_factory=dict)
    view: Number = 0
    since: Annotated[int, msgspec.Meta(ge=-1, le=1 << 62)] = -1


class Thaw(FromWorker, frozen=True, array_like=True):
    """Gives up a `Freeze`. Answered by `Done`."""

    kind: ClassVar[int] = 84
    token: Number


class Load(FromWorker, frozen=True, array_like=True):
    """The chief's first values, or a checkpoint's. Payload as in `Snapshot`.

    It counts in the view of the chief's `Attached` only. Shard 0 is sent it last: where shard 0 has
    values, all shards have values of the same chief.
    """

    kind: ClassVar[int] = 86
    view: Number
    step: Number
    tensors: tuple[TensorSpec, ...]
    workers: tuple[WorkerProgress, ...]
    consumed: tuple[Span, ...]
    sizes: dict[Name, Count] = msgspec.field(default_factory=dict)
    orders: dict[Name, Number] = msgspec.field(default_factory=dict)


class WriteValues(FromWorker, frozen=True, array_like=True):
    """Values that a program has written itself. Payload as in `Snapshot`. Answered by `Done`.

    They replace the server's at once; the optimizer's state stays. A worker of a synchronous job
    sends them before its push, without which no round is closed. While a copy is under way the
    answer is `busy`.
    """

    kind: ClassVar[int] = 85
    view: Number
    tensors: tuple[TensorSpec, ...]


class Loaded(Message, frozen=True, array_like=True):
    """The answer to `Load`."""

    kind: ClassVar[int] = 87
    step: Number
