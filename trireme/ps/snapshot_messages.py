"""The messages of a consistent copy of all shards, and of values that are loaded."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from trireme.ps.messages import Attach, FromWorker, LayoutSpec, ParameterSpec, Span, WorkerProgress
from trireme.wire.message import Message, Name, Number

Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]  # how many examples a data set has


class TakeSnapshot(FromWorker, frozen=True, array_like=True):
    """Asks for a copy of this shard; every shard is asked, and all copy at the same point."""

    kind: ClassVar[int] = 80
    token: Number  # names the copy among all of this worker
    # whether the copy includes the optimizer's state and the extra values, besides the values
    state: bool


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a snapshot's payload."""

    key: Name  # `values`, `average`, or `state/NAME` with the optimizer's name for it
    dtype: Name  # the dtype's name
    vector: Name  # which flat vector it is a part of
    # the elements of that vector; for a scalar, those that it holds for
    start: Number
    stop: Number
    # the parameter group, for a scalar; -1 otherwise
    group: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 16)] = -1


class Snapshot(Message, frozen=True, array_like=True):
    """The answer to `TakeSnapshot`. Payload: the tensors, one after the other."""

    kind: ClassVar[int] = 83
    step: Number  # the global step
    tensors: tuple[TensorSpec, ...]  # the tensors of the payload
    workers: tuple[WorkerProgress, ...]  # the exactly-once table
    consumed: tuple[Span, ...]  # the examples that are in the parameters (shard 0)
    # how many examples each data set has (shard 0)
    sizes: dict[Name, Count] = msgspec.field(default_factory=dict)
    # the fingerprint of each data set's order (shard 0)
    orders: dict[Name, Number] = msgspec.field(default_factory=dict)
    # the layout, where parameters were added, which the worker may lack
    layout: LayoutSpec | None = None
    written: bool = False  # whether a program has written to the values since that step


class AddParameters(FromWorker, frozen=True, array_like=True):
    """A worker's program has given its optimizer more parameters. Payload: as in `Snapshot`.

    The payload are their values, and what a checkpoint has of the optimizer's state. Every shard is
    asked, and all add them at the same point. Answered by `ParametersAdded`.
    """

    kind: ClassVar[int] = 82
    view: Number
    token: Number  # names the request among all of this worker
    shown: Attach  # the model with them
    tensors: tuple[TensorSpec, ...]


class ParametersAdded(Message, frozen=True, array_like=True):
    """The answer to `AddParameters`: those parameters of the worker that the job trains now.

    Where some are missing the worker knows too little: it asks again, with these before.
    """

    kind: ClassVar[int] = 84
    parameters: tuple[ParameterSpec, ...]


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
    sends them before its push, without which no round is closed.
    """

    kind: ClassVar[int] = 85
    view: Number
    tensors: tuple[TensorSpec, ...]


class Loaded(Message, frozen=True, array_like=True):
    """The answer to `Load`."""

    kind: ClassVar[int] = 87
    step: Number
