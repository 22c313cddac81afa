"""The messages between tasks and the coordinator. Kinds 16 to 63.

A task joins once per connection. After that both sides may send at any time. The replies to
`StatusQuery` and `Scale` carry the sequence of the request's frame.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from trireme.cluster.view import ShardEntry, View
from trireme.wire.message import Catalog, Index, Message, Name, Number

Outcome = Literal["finished", "interrupted", "failed"]  # how a task, and the whole job, may end

Phase = Literal["forming", "running", "finished", "interrupted", "failed"]

TaskState = Literal["expected", "live", "disconnected", "lost", "left"]
"""The state of a task: not joined yet; connected; disconnected for now; given up; it has left."""

Refusal = Literal["outside", "claimed", "superseded", "unknown", "deposed", "dismissed", "scale"]
"""Why a task may not join, or why a job is not scaled (`scale`); the reason says it in words."""

MAX_LINE = 16 << 10
Line = Annotated[str, msgspec.Meta(max_length=MAX_LINE)]  # a line for people to read

StatusValue = float | Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)] | Line
"""A value in the status of a heartbeat."""


# Task to coordinator ---------------------------------------------------------------------------


class Join(Message, frozen=True, array_like=True):
    """A task asks to join: answered by `Joined`, `RequestRefused`, or `JobOver` after the end."""

    kind: ClassVar[int] = 16
    role: Name
    index: Index
    incarnation: Number  # 0 for a process that joins for the first time
    host: Name
    pid: Number
    address: Name  # at which it listens, with its scheme; "" if it does not listen
    term: Number = 0  # of the coordinator that it heard last: one of an earlier term was replaced
    start: Number = 0  # a random number of the process: it may ask again without an answer


class Heartbeat(Message, frozen=True, array_like=True):
    """The task is alive. `status` is its newest status report."""

    kind: ClassVar[int] = 19
    status: Annotated[dict[Name, StatusValue], msgspec.Meta(max_length=4096)]
    heard: float = 0.0  # the `time` of the last answer that has come over this connection


class Leave(Message, frozen=True, array_like=True):
    """The task ends, and why; for `failed` that is the error. Answered by `Left`."""

    kind: ClassVar[int] = 24
    outcome: Outcome
    reason: Line = ""


class LastStepSaved(Message, frozen=True, array_like=True):
    """The chief has saved the last step, where steps are saved: no worker takes over from it."""

    kind: ClassVar[int] = 38
    step: Number


class Signalled(Message, frozen=True, array_like=True):
    """A signal asks the task to end. A worker hears `Dismissed`, or `Interrupted`, in answer."""

    kind: ClassVar[int] = 40
    signal: Name
    stops: bool = False  # the whole job, as after Ctrl-C


class JobOverHeard(Message, frozen=True, array_like=True):
    """The answer to `JobOver`; nothing comes after it."""

    kind: ClassVar[int] = 27


class _OfCopy(Message, frozen=True, array_like=True):
    """What a shard's primary says of another server's replica, as it has it now."""

    generation: Number
    shard: Number
    server: Index
    incarnation: Number


class CaughtUp(_OfCopy, frozen=True, array_like=True):
    """A shard's primary: a joining replica confirms every update from now on."""

    kind: ClassVar[int] = 28


class CopyLost(_OfCopy, frozen=True, array_like=True):
    """A shard's primary: a replica that its entries cannot bring up to date, to be filled again."""

    kind: ClassVar[int] = 30


class LinkLost(_OfCopy, frozen=True, array_like=True):
    """A shard's primary: it makes no progress with a backup, or with the primary of shard 0."""

    kind: ClassVar[int] = 39


class ReadyToSwitch(Message, frozen=True, array_like=True):
    """A shard's primary: the shard has stopped at the common cut of a reconfiguration."""

    kind: ClassVar[int] = 29
    view: Number  # that has announced the reconfiguration
    generation: Number  # that ends
    shard: Number


# Coordinator to task ---------------------------------------------------------------------------


class Joined(Message, frozen=True, array_like=True):
    """The task is a member now."""

    kind: ClassVar[int] = 17
    incarnation: int  # the number of this start of the task
    heartbeat_interval: float  # seconds, as the others
    heartbeat_timeout: float  # after so long a silence each side gives the other up
    epoch: str = ""  # of the job: every later handshake of the task names it
    term: int = 1  # the number of this start of the coordinator within the epoch
    rejoin_timeout: float = 600.0  # how long the task goes on without a coordinator


class RequestRefused(Message, frozen=True, array_like=True):
    """The task may not join, or the job is not scaled so. `code` and `reason` say why."""

    kind: ClassVar[int] = 18
    code: Refusal
    reason: str


class HeartbeatHeard(Message, frozen=True, array_like=True):
    """The answer to `Heartbeat`: the coordinator is alive too. Unasked, it wants a `Heartbeat`."""

    kind: ClassVar[int] = 20
    time: float = 0.0  # of the coordinator's clock, in seconds


class ViewChanged(Message, frozen=True, array_like=True):
    """Carries the newest view."""

    kind: ClassVar[int] = 21
    view: View


class WaitingFor(Message, frozen=True, array_like=True):
    """The job waits for the named tasks, and fails if they do not join in so many seconds."""

    kind: ClassVar[int] = 22
    names: tuple[str, ...]
    deadline_seconds: float


class Left(Message, frozen=True, array_like=True):
    """The answer to `Leave`."""

    kind: ClassVar[int] = 25


class JobOver(Message, frozen=True, array_like=True):
    """The job has ended. Answered by `JobOverHeard`."""

    kind: ClassVar[int] = 26
    outcome: Outcome
    culprit: str  # the name of the task that failed first; "" for `finished`
    reason: str


class Dismissed(Message, frozen=True, array_like=True):
    """The job goes on without the task: it finishes its update, and leaves. `reason` says why."""

    kind: ClassVar[int] = 31
    reason: str


class Interrupted(Message, frozen=True, array_like=True):
    """The job stops before its end, for `reason`: at a step that all agree on, which is saved."""

    kind: ClassVar[int] = 41
    reason: str


# Anybody to coordinator ------------------------------------------------------------------------


class StatusQuery(Message, frozen=True, array_like=True):
    """Asks for the job's status. Answered by `ClusterStatus`."""

    kind: ClassVar[int] = 32


class Scale(Message, frozen=True, array_like=True):
    """Asks for other numbers of tasks; None for as many as now. Answered by `Scaled`."""

    kind: ClassVar[int] = 34
    servers: Index | None = None
    workers: Index | None = None


class Scaled(Message, frozen=True, array_like=True):
    """The answer to `Scale`: how many tasks the job shall have, and which are to come or leave."""

    kind: ClassVar[int] = 35
    servers: int
    workers: int
    awaited: tuple[str, ...]  # tasks without a process: whoever starts tasks starts these
    dismissed: tuple[str, ...]  # tasks that are to leave, and have not left yet


class TaskStatus(msgspec.Struct, frozen=True, array_like=True):
    """One task, as the coordinator sees it."""

    role: str
    index: int
    state: TaskState
    reason: str  # the last thing that happened to it
    incarnation: int  # 0 if it never joined
    host: str
    pid: int
    address: str
    quiet_seconds: float  # how long ago it was last heard; -1 if never
    status: dict[str, StatusValue]  # of its last heartbeat
    dismissed: bool = False

    @property
    def name(self) -> str:
        return f"{self.role}:{self.index}"


class ClusterStatus(Message, frozen=True, array_like=True):
    """The answer to `StatusQuery`."""

    kind: ClassVar[int] = 33
    phase: Phase
    reason: str
    view: int  # the number of the newest view; 0 before the first
    missing: tuple[str, ...]  # the tasks that the job waits for
    tasks: tuple[TaskStatus, ...]  # servers first
    term: int = 1
    replicas: int = 1  # how many servers shall hold each shard
    servers: int = 0  # how many tasks of each role the job shall have
    workers: int = 0
    shards: tuple[ShardEntry, ...] = ()  # these four as in the newest view
    generation: int = 1
    next_shards: tuple[ShardEntry, ...] = ()
    life: int = 0
    whole: bool = True  # every shard has all its copies, and no reconfiguration is under way


CLUSTER_MESSAGES = tuple(
    each
    for each in globals().values()
    if isinstance(each, type) and issubclass(each, Message) and each.kind
)
CLUSTER_CATALOG = Catalog(CLUSTER_MESSAGES)
