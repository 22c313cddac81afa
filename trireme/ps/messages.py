"""The messages between workers and parameter servers, of kinds 64 to 127.

The sender of a message is known from the handshake of its connection, and no field repeats it. The
base class of a message says which role may send it; replies have none. Every request gets one reply
with the same frame sequence, and before it perhaps `Waiting` notices.

The messages of a consistent copy are in `snapshot_messages`, those between shards in
`leader.decisions`, those between replicas in `replication.messages`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, TypedDict

import msgspec

from trireme.ps.extra import Extra, ExtraRequest, ShownExtension
from trireme.ps.rule import Rule
from trireme.wire.message import Index, Message, Name, Number

# The description of a model ---------------------------------------------------------------------


Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]  # of one dimension

Shape = Annotated[tuple[Size, ...], msgspec.Meta(max_length=64)]  # a parameter's sizes

Pairs = Annotated[tuple[tuple[Number, Number], ...], msgspec.Meta(max_length=1 << 16)]
"""At most one pair for each task that a job can have."""


class ParameterSpec(msgspec.Struct, frozen=True, array_like=True):
    """One parameter: its name, shape, dtype name (`float32`) and parameter group's index."""

    name: Name
    shape: Shape
    dtype: Name
    group: Index
    # 0 for a parameter that was there when training began; else in which addition it came
    addition: Index = 0


class LayoutSpec(msgspec.Struct, frozen=True, array_like=True):
    """The parameters in the order in which they lie in the flat vectors, and their division."""

    # sorted by (addition, dtype, group), in the module's order within
    parameters: tuple[ParameterSpec, ...]
    # the slots at which shards begin, and the number of slots of the flat vectors,
    # which is fixed when the job begins
    bounds: Annotated[tuple[Number, ...], msgspec.Meta(max_length=1 << 16)]

    @property
    def slots(self) -> int:
        return self.bounds[-1]

    @property
    def shards(self) -> int:
        return len(self.bounds) - 1


class GroupSpec(msgspec.Struct, frozen=True, array_like=True):
    """The hyper-parameters of one parameter group, by `torch.optim`'s names."""

    values: dict[str, float | int | bool | tuple[float, ...] | None]  # the numbers
    # the registry name of the optimizer that updates this group; empty for that of the
    # `OptimizerSpec`
    optimizer: str = ""


class OptimizerSpec(msgspec.Struct, frozen=True, array_like=True):
    """An optimizer as a registry name and numbers; or several, each with its groups."""

    name: Name  # the optimizer of the groups that name none of their own
    groups: tuple[GroupSpec, ...]  # the parameter groups, in the layout's order

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(group.optimizer or self.name for group in self.groups)


# Verdicts ---------------------------------------------------------------------------------------


class Applied(msgspec.Struct, frozen=True, array_like=True, tag="applied"):
    """The update is in the parameters; `step` is the global step that it made."""

    step: Number


class Stale(msgspec.Struct, frozen=True, array_like=True, tag="stale"):
    """The update was not applied: its round was closed, or the job is over, at `step`."""

    step: Number


class RejectedVerdict(msgspec.Struct, frozen=True, array_like=True, tag="rejected"):
    """The server refuses the request: it makes no sense, or cannot be applied."""

    reason: str


class Duplicate(msgspec.Struct, frozen=True, array_like=True, tag="duplicate"):
    """The push was decided before, with the verdict `original`."""

    original: Applied | Stale | RejectedVerdict


class FencedVerdict(msgspec.Struct, frozen=True, array_like=True, tag="fenced"):
    """The request carried another view than the server's (`view`), or an old incarnation."""

    view: Number
    reason: str


Verdict = Applied | Stale | Duplicate | FencedVerdict | RejectedVerdict


# The roles that may send a message --------------------------------------------------------------


class FromWorker(Message, frozen=True, array_like=True):
    """A request that only a worker may send."""


class FromServer(Message, frozen=True, array_like=True):
    """A message that only another parameter server may send."""


class FromAnyone(Message, frozen=True, array_like=True):
    """A request that every task of the job may send."""


# Worker to server -------------------------------------------------------------------------------


class Attach(FromWorker, frozen=True, array_like=True):
    """A worker shows its model. The first one creates the values; the others must be the same."""

    kind: ClassVar[int] = 64
    view: Number
    layout: LayoutSpec
    optimizer: OptimizerSpec
    rule: Rule
    extension: ShownExtension | None = None  # the model's extra values


class Attached(Message, frozen=True, array_like=True):
    """The answer to `Attach`: whether values are loaded, their global step, and in which view."""

    kind: ClassVar[int] = 65
    loaded: bool
    step: Number
    view: Number


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Examples of a data set by position: [start, stop) in the endless sequence of its epochs."""

    dataset: Name
    start: Number
    stop: Number


class Push(FromWorker, frozen=True, array_like=True):
    """A worker's update. Payload: the gradient, as this server's part of each flat vector.

    Where workers train locally between pushes, it is a delta: the pulled values less the present.
    """

    kind: ClassVar[int] = 66
    view: Number
    sequence: Number  # 1 for the first push of this incarnation, then one more with each
    # the highest sequence whose verdict the worker has; the server may forget the verdicts up to it
    acknowledged: Number
    pulled: Number  # the global step of the values that the gradient was computed from
    weight: float  # how many examples the gradient is the mean of; 0 leaves the gradient out
    # the optimizer's hyper-parameters by group, where they changed since the last push
    hyper: tuple[GroupSpec, ...] | None = None
    examples: tuple[Span, ...] = ()  # the examples that it was computed from; only for shard 0
    pull: bool = True  # whether the answer carries the new values
    # how many of the worker's own steps a delta is the sum of; the global step grows by this number
    steps: Number = 1
    # the positions, among all parameters in the vectors' order, of those that have no gradient, in
    # ascending order. The payload is zero there. A parameter that is absent in every update of a
    # step is left out of it: neither its value nor its optimizer state changes.
    absent: tuple[Number, ...] = ()
    # updates of extra values, and which of them the answer brings, as they are after the update
    extra: Extra = ()
    # a digest of the values that the worker has written before, by `WriteValues`; 0 for none; and
    # from bit 32 on, which of several optimizers makes the step. The updates of a round must agree.
    written: Number = 0
    digest: Number = 0  # of the payload; 0 where none was taken


class PushFields(TypedDict, total=False):
    """What a push is of, besides its weight; what is left out is as in `Push`."""

    hyper: tuple[GroupSpec, ...] | None  # the present ones; None where the worker has its own
    optimizer: int  # the position of the one that makes the step, of several
    examples: Sequence[Span]
    pull: bool
    pulled: int | None  # None for the step of the newest values
    steps: int  # 0 where servers that apply each update by itself take one of weight 0 as no step
    absent: tuple[int, ...]  # where it is left out: those that have no gradient now
    extra: ExtraRequest | None  # updates of extra values, and which of them are wanted


class PushReply(Message, frozen=True, array_like=True):
    """The answer to `Push`. Payload: the values, if they were asked for and there are any."""

    kind: ClassVar[int] = 67
    verdict: Verdict  # the verdict on the update
    step: Number  # the global step of the values in the payload
    staleness: int  # how many global steps lie between this worker's pull and its push
    stop: bool  # whether the worker should stop training: the job's end is reached or was asked for
    # a notice for the worker's program, such as that the workers of a round disagree about the
    # learning rate; empty as a rule
    notice: str = ""
    extra: Extra = ()  # the extra values that the push wanted
    digest: Number = 0  # of the values; 0 where none was taken


class Pull(FromWorker, frozen=True, array_like=True):
    """Asks for this server's part of the values. Withheld until values are loaded.

    If `train`, shard 0 counts the worker's update among those under way, so that the job ends at
    exactly its last step. The answer is withheld until the step is at least `at_least`.
    """

    kind: ClassVar[int] = 68
    view: Number
    train: bool = True
    at_least: Number = 0


class PullReply(Message, frozen=True, array_like=True):
    """The answer to `Pull`. Payload: the values, of the given global step."""

    kind: ClassVar[int] = 69
    step: Number
    stop: bool
    digest: Number = 0  # of the values; 0 where none was taken


class PullExtra(FromWorker, frozen=True, array_like=True):
    """Asks for extra values as they are now. Refused before values are loaded."""

    kind: ClassVar[int] = 124
    view: Number
    extra: Extra


class PulledExtra(Message, frozen=True, array_like=True):
    """The answer to `PullExtra`: the global step, and the values."""

    kind: ClassVar[int] = 125
    step: Number
    extra: Extra


class Waiting(Message, frozen=True, array_like=True):
    """A notice that the reply is withheld: the reason, the tasks waited for, and the seconds."""

    kind: ClassVar[int] = 70
    reason: str
    names: tuple[str, ...]
    seconds: float


class Refused(Message, frozen=True, array_like=True):
    """The answer to any request that cannot be served, at a server of that `view`."""

    kind: ClassVar[int] = 71
    code: str  # `fenced`, `rejected`, `mismatch`, `optimizer` or `busy`
    reason: str
    view: Number


class Done(Message, frozen=True, array_like=True):
    """The answer to a request that needs no other answer: it is done."""

    kind: ClassVar[int] = 95


class Lease(FromWorker, frozen=True, array_like=True):
    """Asks shard 0 for the next examples of a data set: `count` batches of `batch` examples.

    A repeat with the same number gets the same examples. With a `count` of 0 nothing is dealt; with
    a `size` of 0 the data set's is taken that is known.
    """

    kind: ClassVar[int] = 72
    view: Number
    dataset: Name
    size: Number
    batch: Number
    count: Number
    number: Number = 0  # 1 for the first lease of this incarnation, then one more with each
    resized: bool = False  # whether another size than the checkpoint's is meant: a new epoch begins
    end: Number = 0  # a batch that crosses an epoch's end: takes the next's (0), is cut (1), no (2)
    until: Number = 0  # positions from here on are not dealt; 0 for all
    lacks: Pairs = ()  # positions without an example, as the data ended before: they count
    order: Number = 0  # a fingerprint of the order of examples, which all must share; 0 for none
    left_out: Pairs = ()  # positions that the program was dealt and left out: they count

    @classmethod
    def of(
        cls, dataset: str, size: int, batch: int, count: int, number: int, fields: LeaseFields
    ) -> Lease:
        named: dict[str, Any] = {**fields}
        for field in ("lacks", "left_out"):
            named[field] = tuple(named.get(field, ()))
        return cls(0, dataset, size, batch, count, number, **named)


class LeaseFields(TypedDict, total=False):
    """Those fields of `Lease` that may be left out; see there."""

    resized: bool
    end: int
    until: int
    lacks: Sequence[tuple[int, int]]
    order: int
    left_out: Sequence[tuple[int, int]]


class Leased(Message, frozen=True, array_like=True):
    """The answer to `Lease`: one span a batch, fewer where no more are left before `until`.

    An empty span says that the worker sits out one synchronous round.
    """

    kind: ClassVar[int] = 73
    spans: tuple[Span, ...]
    finished: bool = False  # whether all examples before `until` are in the parameters
    epoch: Number = 0  # the first of which some are not
    awaited: bool = False  # whether a synchronous round waits for an update of this worker


class StopJob(FromWorker, frozen=True, array_like=True):
    """Asks shard 0 to end the job at the next step at which every worker can."""

    kind: ClassVar[int] = 74
    reason: str


class Stopping(Message, frozen=True, array_like=True):
    """The answer to `StopJob`: the global step at which the job will end."""

    kind: ClassVar[int] = 75
    step: Number


class Drain(FromWorker, frozen=True, array_like=True):
    """Asks shard 0 to answer once every worker has retired. Answered by `Stopping`."""

    kind: ClassVar[int] = 77


class Retire(FromWorker, frozen=True, array_like=True):
    """Says that the worker trains no more, though it stays. Answered by `Done`."""

    kind: ClassVar[int] = 78


# What workers share through shard 0 ------------------------------------------------------------


class Share(FromWorker, frozen=True, array_like=True):
    """Shares bytes with the other workers under a topic; a worker's last ones replace those before.

    Payload: the bytes; without any the server forgets the topic. Answered by `Done`.
    """

    kind: ClassVar[int] = 88
    topic: Name


class Collect(FromWorker, frozen=True, array_like=True):
    """Asks for the bytes that workers have shared under a topic. Answered by `Collected`."""

    kind: ClassVar[int] = 90
    topic: Name


class Collected(Message, frozen=True, array_like=True):
    """The answer to `Collect`. Payload: the bytes of each of `workers`, of the given `sizes`."""

    kind: ClassVar[int] = 91
    workers: tuple[int, ...]
    sizes: tuple[int, ...]


# Anybody to server ------------------------------------------------------------------------------


class Status(FromAnyone, frozen=True, array_like=True):
    """Asks for the server's status. Answered by `ServerStatus`."""

    kind: ClassVar[int] = 110


class WorkerProgress(msgspec.Struct, frozen=True, array_like=True):
    """One line of the exactly-once table."""

    worker: Index
    incarnation: Number
    sequence: Number
    applied: Number
    stale: Number


class ServerStatus(Message, frozen=True, array_like=True):
    """The answer to `Status`."""

    kind: ClassVar[int] = 111
    step: Number
    loaded: bool
    view: Number
    workers: tuple[WorkerProgress, ...]
    counters: dict[str, float]
