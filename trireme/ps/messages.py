"""What workers and parameter servers say to each other: messages of kinds 64 to 127.

Who says a message is known from the handshake of its connection: a worker's requests belong to the
worker and the incarnation that the handshake has proven, and no field repeats them. Which role may
say a message is its base class: `FromWorker`, `FromServer` or `FromAnyone`. Replies have neither.

What a consistent copy takes is in `snapshot_messages`, and what servers tell each other in
`server_messages`.

Every request is answered by one reply with the same frame sequence; before it, `Waiting` notices
with that sequence may come, which say for whom the reply is withheld.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from trireme.ps.rule import Rule
from trireme.wire.message import Index, Message, Name, Number

__all__ = [
    "Applied",
    "Attach",
    "Attached",
    "Collect",
    "Collected",
    "Done",
    "Drain",
    "Duplicate",
    "FencedVerdict",
    "FromAnyone",
    "FromServer",
    "FromWorker",
    "GroupSpec",
    "LayoutSpec",
    "Lease",
    "Leased",
    "LendMemory",
    "MemoryLent",
    "OptimizerSpec",
    "Pairs",
    "ParameterSpec",
    "Pull",
    "PullReply",
    "Push",
    "PushReply",
    "Refused",
    "RejectedVerdict",
    "Retire",
    "ServerStatus",
    "SetEnd",
    "Share",
    "Span",
    "Stale",
    "Status",
    "StopJob",
    "Stopping",
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


class Done(Message, frozen=True, array_like=True):
    """The answer to a request that asks for nothing: it is done."""

    kind: ClassVar[int] = 95


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
    """A worker says that it trains no more, though it stays: nobody shall wait for its updates.

    Answered by `Done`.
    """

    kind: ClassVar[int] = 78


# What workers tell each other through server 0 --------------------------------------------------


class Share(FromWorker, frozen=True, array_like=True):
    """A worker leaves something for the others, by topic; its last replaces the one before.

    Payload: bytes that the server does not look at. Answered by `Done`.
    """

    kind: ClassVar[int] = 88
    topic: Name


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


# Anybody to server -----------------------------------------------------------------------------


class Status(FromAnyone, frozen=True, array_like=True):
    """Asks how things are. Answered by `ServerStatus`."""

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
