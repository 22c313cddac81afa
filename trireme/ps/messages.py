"""What workers and parameter servers say to each other. Kinds 64 to 127.

Who says a message is known from the handshake of its connection: a worker's requests belong to the
worker and the incarnation that the handshake has proven, and no field repeats them. Which role may
say a message is its base class: `FromWorker`, `FromServer` or `FromAnyone`. Replies have neither.

Every request is answered by one reply with the same frame sequence; before it, `Waiting` notices
with that sequence may come, which say for whom the reply is withheld.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from trireme.ps.rule import Rule
from trireme.wire.message import Catalog, Index, Message, Name, Number

__all__ = [
    "PS_CATALOG",
    "PS_MESSAGES",
    "Applied",
    "Attach",
    "Attached",
    "Collect",
    "Collected",
    "Cut",
    "Drain",
    "Duplicate",
    "FencedVerdict",
    "Freeze",
    "FromAnyone",
    "FromServer",
    "FromWorker",
    "Frozen",
    "GroupSpec",
    "LastPushes",
    "LayoutSpec",
    "Lease",
    "Leased",
    "LendMemory",
    "Load",
    "Loaded",
    "MemoryLent",
    "OptimizerSpec",
    "ParameterSpec",
    "Pull",
    "PullReply",
    "Push",
    "PushReply",
    "PushesCommitted",
    "PushesStaged",
    "Refused",
    "RejectedVerdict",
    "Retire",
    "Retired",
    "RoundClose",
    "RoundReady",
    "ServerStatus",
    "SetEnd",
    "Share",
    "Shared",
    "Snapshot",
    "Span",
    "Stale",
    "Status",
    "StopJob",
    "Stopping",
    "TensorSpec",
    "Thaw",
    "Thawed",
    "Trace",
    "Traced",
    "Verdict",
    "Waiting",
    "WorkerProgress",
]

# What a model is, without code -----------------------------------------------------------------


Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
"""Of one dimension."""

Shape = Annotated[tuple[Size, ...], msgspec.Meta(max_length=64)]
"""The sizes of a parameter's dimensions."""

Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]
"""How many examples a data set has."""

Pairs = Annotated[tuple[tuple[Number, Number], ...], msgspec.Meta(max_length=1 << 16)]
"""At most one pair for each task that a job can have."""


class ParameterSpec(msgspec.Struct, frozen=True, array_like=True):
    """One parameter: its name, shape, dtype name (`float32`) and parameter group's index."""

    name: Name
    shape: Shape
    dtype: Name
    group: Index


class LayoutSpec(msgspec.Struct, frozen=True, array_like=True):
    """The parameters in the order in which they lie in the flat vectors, and how they are cut.

    Attributes:
        parameters: sorted by (dtype, group), in the module's order within.
        slots: into how many slots the flat vectors are cut; fixed when the job is created.
        servers: over how many servers the slots are spread.
    """

    parameters: tuple[ParameterSpec, ...]
    slots: Number
    servers: Number


class GroupSpec(msgspec.Struct, frozen=True, array_like=True):
    """The hyper-parameters of one parameter group, by `torch.optim`'s names.

    Attributes:
        values: the numbers.
        optimizer: the registry name of the optimizer that updates this group; empty for that of
            the `OptimizerSpec`.
    """

    values: dict[str, float | int | bool | tuple[float, ...] | None]
    optimizer: str = ""


class OptimizerSpec(msgspec.Struct, frozen=True, array_like=True):
    """An optimizer as a registry name and numbers; or several, of which each has its groups.

    Attributes:
        name: of the groups that name no optimizer of their own.
        groups: the parameter groups, in the order in which the layout counts them.
    """

    name: Name
    groups: tuple[GroupSpec, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each group's optimizer."""
        return tuple(group.optimizer or self.name for group in self.groups)


# Verdicts --------------------------------------------------------------------------------------


class Applied(msgspec.Struct, frozen=True, array_like=True, tag="applied"):
    """The update is in the parameters; `step` is the global step that it made."""

    step: Number


class Stale(msgspec.Struct, frozen=True, array_like=True, tag="stale"):
    """The update's round was closed, or the job is over: it was not applied. `step` is now's."""

    step: Number


class Duplicate(msgspec.Struct, frozen=True, array_like=True, tag="duplicate"):
    """This sequence number was decided before, as `original`."""

    original: Applied | Stale


class FencedVerdict(msgspec.Struct, frozen=True, array_like=True, tag="fenced"):
    """The request carried another view than the server's (`view`), or an old incarnation."""

    view: Number
    reason: str


class RejectedVerdict(msgspec.Struct, frozen=True, array_like=True, tag="rejected"):
    """The request makes no sense to the server."""

    reason: str


Verdict = Applied | Stale | Duplicate | FencedVerdict | RejectedVerdict


# Who may say a message -------------------------------------------------------------------------


class FromWorker(Message, frozen=True, array_like=True):
    """A request that only a worker makes."""


class FromServer(Message, frozen=True, array_like=True):
    """What only another parameter server says."""


class FromAnyone(Message, frozen=True, array_like=True):
    """A request that every task of the job may make."""


# Worker to server ------------------------------------------------------------------------------


class Attach(FromWorker, frozen=True, array_like=True):
    """A worker shows what it trains. The first one creates the shard; the others must agree."""

    kind: ClassVar[int] = 64
    view: Number
    layout: LayoutSpec
    optimizer: OptimizerSpec
    rule: Rule


class Attached(Message, frozen=True, array_like=True):
    """The answer to `Attach`: whether values are loaded, and the global step they are of."""

    kind: ClassVar[int] = 65
    loaded: bool
    step: Number


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Examples of a data set by position: [start, stop) in the endless sequence of its epochs."""

    dataset: Name
    start: Number
    stop: Number


class Push(FromWorker, frozen=True, array_like=True):
    """A worker's update. Payload: the gradient, as this server's part of each flat vector.

    Where workers train by themselves between pushes, the gradient is a delta: the values that the
    worker pulled, less those that it has come to.

    A push that leaves while backward runs begins before its payload is known, and brings the
    chunks of `trireme.ps.layout` in the order in which they become known. A server takes no notice
    of a push before all of it is there.

    Attributes:
        sequence: 1 for the first push of this incarnation, then one more with each.
        acknowledged: the highest sequence whose verdict the worker has; the server may forget
            what it answered up to there.
        pulled: the global step of the values that the gradient was computed from.
        weight: how many examples the gradient is the mean of; 0 contributes nothing.
        hyper: the optimizer's hyper-parameters by group, where they changed since the last push.
        examples: which examples it was computed from; only server 0 is told.
        pull: whether the answer shall carry the new values.
        order: in which order the payload brings the chunks of this server's part, each of them
            once; empty where it brings the part as it lies.
        steps: how many of the worker's own steps a delta is the sum of; the global step grows by
            so many.
        absent: the positions, among all parameters in the vectors' order, of those that have no
            gradient, in ascending order. The payload is zero there. A parameter that is absent in
            every update of a step is left out of it: neither its value nor its optimizer state
            changes.
    """

    kind: ClassVar[int] = 66
    view: Number
    sequence: Number
    acknowledged: Number
    pulled: Number
    weight: float
    hyper: tuple[GroupSpec, ...] | None = None
    examples: tuple[Span, ...] = ()
    pull: bool = True
    order: tuple[Number, ...] = ()
    steps: Number = 1
    absent: tuple[Number, ...] = ()


class PushReply(Message, frozen=True, array_like=True):
    """The answer to `Push`. Payload: the values, if they were asked for and there are any.

    Attributes:
        verdict: what became of the update.
        step: the global step of the values in the payload.
        staleness: how many updates were applied between this worker's pull and its push.
        stop: whether the worker should stop training: the job's end is reached or was asked for.
        since: where the payload is what has changed, packed: of which global step the values are
            to which it is to be added. None where the values are whole.
        notice: what the worker's program should be told, such as that the workers of a round
            disagree about the learning rate; empty as a rule.
    """

    kind: ClassVar[int] = 67
    verdict: Verdict
    step: Number
    staleness: int
    stop: bool
    since: Number | None = None
    notice: str = ""


class Pull(FromWorker, frozen=True, array_like=True):
    """Asks for this server's part of the values. Withheld until values are loaded.

    `train` says that the worker will compute an update from them: server 0 then counts it among
    the updates under way, so that the job ends at exactly its last step. The answer is withheld
    until the step is at least `at_least`: a server that learns of a round a little later than
    server 0 answers with values of the same step.
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


class Waiting(Message, frozen=True, array_like=True):
    """A notice that the reply is withheld: what for, on whom, and since how many seconds."""

    kind: ClassVar[int] = 70
    reason: str
    names: tuple[str, ...]
    seconds: float


class Refused(Message, frozen=True, array_like=True):
    """The answer to any request that cannot be served.

    `code` is one of `fenced`, `rejected`, `mismatch`, `optimizer`, `busy`; `view` is the
    server's.
    """

    kind: ClassVar[int] = 71
    code: str
    reason: str
    view: Number


class Lease(FromWorker, frozen=True, array_like=True):
    """Asks server 0 for the next examples of a data set: `count` batches of `batch` examples.

    `size` is the data set's; all workers must give the same. `number` is 1 for the first lease of
    this incarnation, then one more with each: a repeat with the same number gets the same
    examples, and none are lost with an answer that did not arrive. `resized` says that the data set
    is meant to be of another size than the checkpoint's: then the next epoch begins.
    """

    kind: ClassVar[int] = 72
    view: Number
    dataset: Name
    size: Number
    batch: Number
    count: Number
    number: Number = 0
    resized: bool = False


class Leased(Message, frozen=True, array_like=True):
    """The answer to `Lease`: one span a batch."""

    kind: ClassVar[int] = 73
    spans: tuple[Span, ...]


class StopJob(FromWorker, frozen=True, array_like=True):
    """Asks server 0 to end the job at the next step at which every worker can."""

    kind: ClassVar[int] = 74
    reason: str


class Stopping(Message, frozen=True, array_like=True):
    """The answer to `StopJob`: the global step at which the job will end."""

    kind: ClassVar[int] = 75
    step: Number


class SetEnd(FromWorker, frozen=True, array_like=True):
    """Sets server 0's `max_steps`, where it was not known at `Attach`. Answered by `Stopping`."""

    kind: ClassVar[int] = 76
    max_steps: Number


class Drain(FromWorker, frozen=True, array_like=True):
    """Asks server 0 to answer once every worker has retired. Answered by `Stopping`."""

    kind: ClassVar[int] = 77


class Retire(FromWorker, frozen=True, array_like=True):
    """A worker says that it trains no more, though it stays: nobody shall wait for its updates."""

    kind: ClassVar[int] = 78


class Retired(Message, frozen=True, array_like=True):
    """The answer to `Retire`."""

    kind: ClassVar[int] = 79


# A consistent cut over all servers -------------------------------------------------------------


class Freeze(FromWorker, frozen=True, array_like=True):
    """Asks to apply nothing more until `Cut` and its snapshot, or `Thaw`."""

    kind: ClassVar[int] = 80
    token: Number


class Frozen(Message, frozen=True, array_like=True):
    """The answer to `Freeze`: the last decided sequence of each worker (pairs) and the step.

    `view` is the server's. Sequences count the pushes of one start of a worker, so that those of
    several servers can be compared only within one view.
    """

    kind: ClassVar[int] = 81
    step: Number
    decided: Pairs
    view: Number = 0


class Cut(FromWorker, frozen=True, array_like=True):
    """Asks to decide each worker's pushes up to the given sequence, answer a copy, and go on.

    Attributes:
        token: the one of `Freeze`.
        step: the largest step that any server answered in `Frozen`.
        decided: pairs (worker, sequence): the largest that any server answered in `Frozen`.
        state: whether the optimizer's state and the tables are wanted too, not only the values.
    """

    kind: ClassVar[int] = 82
    token: Number
    step: Number
    decided: Pairs
    state: bool


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


class WorkerProgress(msgspec.Struct, frozen=True, array_like=True):
    """One line of the exactly-once table."""

    worker: Index
    incarnation: Number
    sequence: Number
    applied: Number
    stale: Number


class Snapshot(Message, frozen=True, array_like=True):
    """The answer to `Cut`. Payload: the tensors, one after the other.

    Attributes:
        step: the global step.
        tensors: what the payload holds.
        workers: the exactly-once table.
        consumed: which examples are in the parameters (server 0).
        sizes: how many examples each data set has (server 0).
    """

    kind: ClassVar[int] = 83
    step: Number
    tensors: tuple[TensorSpec, ...]
    workers: tuple[WorkerProgress, ...]
    consumed: tuple[Span, ...]
    sizes: dict[Name, Count] = msgspec.field(default_factory=dict)


class Thaw(FromWorker, frozen=True, array_like=True):
    """Gives up a `Freeze`. Answered by `Thawed`."""

    kind: ClassVar[int] = 84
    token: Number


class Thawed(Message, frozen=True, array_like=True):
    """The answer to `Thaw`."""

    kind: ClassVar[int] = 85


class Load(FromWorker, frozen=True, array_like=True):
    """The chief's first values, or a checkpoint's. Payload as in `Snapshot`."""

    kind: ClassVar[int] = 86
    view: Number
    step: Number
    tensors: tuple[TensorSpec, ...]
    workers: tuple[WorkerProgress, ...]
    consumed: tuple[Span, ...]
    sizes: dict[Name, Count] = msgspec.field(default_factory=dict)


class Loaded(Message, frozen=True, array_like=True):
    """The answer to `Load`."""

    kind: ClassVar[int] = 87
    step: Number


# What workers tell each other through server 0 --------------------------------------------------


class Share(FromWorker, frozen=True, array_like=True):
    """A worker leaves something for the others, by topic; its last replaces the one before.

    Payload: bytes that the server does not look at. Answered by `Shared`.
    """

    kind: ClassVar[int] = 88
    topic: Name


class Shared(Message, frozen=True, array_like=True):
    """The answer to `Share`."""

    kind: ClassVar[int] = 89


class Collect(FromWorker, frozen=True, array_like=True):
    """Asks for what workers have left under a topic. Answered by `Collected`."""

    kind: ClassVar[int] = 90
    topic: Name


class Collected(Message, frozen=True, array_like=True):
    """The answer to `Collect`. Payload: what each of `workers` left, of so many bytes."""

    kind: ClassVar[int] = 91
    workers: tuple[int, ...]
    sizes: tuple[int, ...]


# Memory lent over shm:// -------------------------------------------------------------------------


class LendMemory(FromWorker, frozen=True, array_like=True):
    """A worker lends this server memory; its descriptor comes along. Answered by `MemoryLent`.

    Attributes:
        nbytes: the memory's size.
        outbound: (offset, length) in bytes of the places that pushes come from.
        inbound: of the places that values go to.
    """

    kind: ClassVar[int] = 92
    nbytes: Number
    outbound: Pairs
    inbound: Pairs


class MemoryLent(Message, frozen=True, array_like=True):
    """The answer to `LendMemory`: whether the server sees the memory."""

    kind: ClassVar[int] = 93
    accepted: bool


# Server to server ------------------------------------------------------------------------------


class RoundReady(FromServer, frozen=True, array_like=True):
    """To server 0: whose updates for a round this server holds, and will keep until it is closed.

    Attributes:
        step: the global step on top of which the round is.
        members: pairs (worker, incarnation).
        measured: the members whose mean gradient `square` is of; none where nothing is clipped.
        square: the squared L2 norm of this server's part of that mean.
    """

    kind: ClassVar[int] = 96
    step: Number
    members: Pairs
    measured: Pairs
    square: float


class RoundClose(FromServer, frozen=True, array_like=True):
    """From server 0: whose updates make the round, and how to scale their mean.

    `members` are pairs (worker, incarnation). A `scale` of -1 only proposes them: each server
    shall answer with the squared norm of its part of their mean.
    """

    kind: ClassVar[int] = 97
    step: Number
    members: Pairs
    scale: float


class PushesStaged(FromServer, frozen=True, array_like=True):
    """To server 0: which asynchronous pushes this server has, and will keep until they are decided.

    Attributes:
        known: of how many decisions of server 0 it has heard.
        pushes: triples (worker, incarnation, sequence).
    """

    kind: ClassVar[int] = 98
    known: Number
    pushes: tuple[tuple[Number, Number, Number], ...]


class PushesCommitted(FromServer, frozen=True, array_like=True):
    """From server 0: what it has decided of asynchronous pushes; all servers do so in this order.

    What it has not decided of workers that are not in its view, it never will.

    Attributes:
        first: the number of the first of these decisions, counted from 0.
        pushes: worker, incarnation, sequence, and whether the push is applied; else it is stale.
        view: the number of the view that server 0 has taken.
    """

    kind: ClassVar[int] = 99
    first: Number
    pushes: tuple[tuple[Number, Number, Number, bool], ...]
    view: Number


class LastPushes(FromServer, frozen=True, array_like=True):
    """To server 0: which was the last push that this server has of workers that are out.

    Where servers commit no pushes, that is how server 0 finds those that are on some of them only.

    Attributes:
        view: the number of the view that it has taken.
        pushes: worker, incarnation, the sequence of its last push here, and the view since which it
            is out.
    """

    kind: ClassVar[int] = 94
    view: int
    pushes: tuple[tuple[int, int, int, int], ...]


# Anybody to server -----------------------------------------------------------------------------


class Status(FromAnyone, frozen=True, array_like=True):
    """Asks how things are. Answered by `ServerStatus`."""

    kind: ClassVar[int] = 110


class ServerStatus(Message, frozen=True, array_like=True):
    """The answer to `Status`."""

    kind: ClassVar[int] = 111
    step: Number
    loaded: bool
    view: Number
    workers: tuple[WorkerProgress, ...]
    counters: dict[str, float]


class Trace(FromAnyone, frozen=True, array_like=True):
    """Asks a server to note what it does when, to end that, or for its notes. Answered by `Traced`.

    It notes while anybody wants it to; notes are dropped when somebody is the first to want them.
    """

    kind: ClassVar[int] = 112
    action: Literal["start", "stop", "read"]


class Traced(Message, frozen=True, array_like=True):
    """The answer to `Trace`. Payload: the notes as JSON, if they were asked for.

    Attributes:
        now: the time at the server, in seconds on its monotonic clock.
        clock: which clock that is: tasks that name the same one read the same one.
    """

    kind: ClassVar[int] = 113
    now: float
    clock: str


PS_MESSAGES: tuple[type[Message], ...] = (
    Attach,
    Attached,
    Push,
    PushReply,
    Pull,
    PullReply,
    Waiting,
    Refused,
    Lease,
    Leased,
    StopJob,
    Stopping,
    SetEnd,
    Drain,
    Retire,
    Retired,
    Freeze,
    Frozen,
    Cut,
    Snapshot,
    Thaw,
    Thawed,
    Load,
    Loaded,
    Share,
    Shared,
    Collect,
    Collected,
    LendMemory,
    MemoryLent,
    RoundReady,
    RoundClose,
    PushesStaged,
    PushesCommitted,
    LastPushes,
    Status,
    ServerStatus,
    Trace,
    Traced,
)
PS_CATALOG = Catalog(PS_MESSAGES)
