"""The messages between tasks and the coordinator. Kinds 16 to 63.

A task joins once per connection. After that both sides may send at any time. Only `StatusQuery` is
a request whose reply carries the sequence of the request's frame.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from trireme.cluster.view import ShardEntry, View
from trireme.wire.message import Catalog, Index, Message, Name, Number

Outcome = Literal["finished", "interrupted", "failed"]
"""How a task, and the whole job, may end."""

Phase = Literal["forming", "running", "finished", "interrupted", "failed"]
"""The phase of a job."""

TaskState = Literal["expected", "live", "disconnected", "lost", "left"]
"""The state of a task: not joined yet; connected; disconnected for now; given up; it has left."""

Refusal = Literal["outside", "claimed", "superseded", "unknown", "deposed", "dismissed", "scale"]
"""Why a task may not join: the cluster has no such task; another process holds it; another process
has taken it over; the coordinator never assigned its incarnation; a coordinator of a later term has
replaced this one; the job was made smaller. Or why it is not scaled: `scale`."""

MAX_LINE = 16 << 10
"""The largest number of characters of a `Line`."""

Line = Annotated[str, msgspec.Meta(max_length=MAX_LINE)]
"""A line for people to read."""

StatusValue = float | Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)] | Line
"""A value in the status of a heartbeat."""


# Task to coordinator ---------------------------------------------------------------------------


class Join(Message, frozen=True, array_like=True):
    """A task asks to join. Answered by `Joined`, by `Refused`, or by `JobOver` if the job is over.

    Attributes:
        role: `ps` or `worker`.
        index: the task's index.
        incarnation: 0 for a process that joins for the first time; the assigned incarnation for a
            process that connects again.
        host: the name of its host.
        pid: its process id there.
        address: the address at which it listens, with its scheme; "" if it does not listen.
        term: the coordinator's term that the process last received; 0 for one that joins for the
            first time. A coordinator of an earlier term was replaced, and admits no task.
        start: a random number of this process, so that one that has not heard the answer to its
            first `Join` is recognized when it asks again; 0 for none.
    """

    kind: ClassVar[int] = 16
    role: Name
    index: Index
    incarnation: Number
    host: Name
    pid: Number
    address: Name
    term: Number = 0
    start: Number = 0


class Heartbeat(Message, frozen=True, array_like=True):
    """The task is alive. `status` is its newest status report."""

    kind: ClassVar[int] = 19
    status: Annotated[dict[Name, StatusValue], msgspec.Meta(max_length=4096)]


class Leave(Message, frozen=True, array_like=True):
    """The task ends. Answered by `Left`.

    Attributes:
        outcome: how it ended.
        reason: why; for `failed`, the error.
    """

    kind: ClassVar[int] = 24
    outcome: Outcome
    reason: Line = ""


class LastStepSaved(Message, frozen=True, array_like=True):
    """The chief has saved the last step, where steps are saved. Nobody has to take over from it.

    Attributes:
        step: the global step at which training has ended.
    """

    kind: ClassVar[int] = 38
    step: Number


class Signalled(Message, frozen=True, array_like=True):
    """A signal asks the process of the task to end. Sent once over each connection.

    A worker hears in answer that it leaves (`Dismissed`) or that the job stops (`Interrupted`).

    Attributes:
        signal: its name, such as `SIGTERM`.
        stops: whether the whole job is to stop, as after Ctrl-C.
    """

    kind: ClassVar[int] = 40
    signal: Name
    stops: bool = False


class JobOverHeard(Message, frozen=True, array_like=True):
    """The answer to `JobOver`; nothing comes after it."""

    kind: ClassVar[int] = 27


class CaughtUp(Message, frozen=True, array_like=True):
    """A shard's primary: a joining replica confirms every update from now on, and it is waited for.

    Attributes:
        generation: the generation of the shard.
        shard: the shard's number.
        server: the index of the server with the replica.
        incarnation: that server's.
    """

    kind: ClassVar[int] = 28
    generation: Number
    shard: Number
    server: Index
    incarnation: Number


class CopyLost(Message, frozen=True, array_like=True):
    """A shard's primary: the replica at a server cannot be brought up to date, and must be filled.

    This happens where another backup was promoted that lacks entries which this replica has.

    Attributes:
        generation: the generation of the shard.
        shard: the shard's number.
        server: the index of the server with the replica.
        incarnation: that server's.
    """

    kind: ClassVar[int] = 30
    generation: Number
    shard: Number
    server: Index
    incarnation: Number


class LinkLost(Message, frozen=True, array_like=True):
    """A shard's primary: it makes no progress with another server that the shard needs.

    The other one holds a copy of the shard and confirms nothing, or is the primary of shard 0 and
    cannot be reached. Both may reach the coordinator: the link between the two is broken.

    Attributes:
        generation: the generation of the shard.
        shard: the shard's number.
        server: the index of the other server.
        incarnation: the other server's.
    """

    kind: ClassVar[int] = 39
    generation: Number
    shard: Number
    server: Index
    incarnation: Number


class ReadyToSwitch(Message, frozen=True, array_like=True):
    """A shard's primary: the shard has stopped at the common cut of a reconfiguration.

    Attributes:
        view: the number of the view that has announced the reconfiguration.
        generation: the generation that ends.
        shard: the shard's number.
    """

    kind: ClassVar[int] = 29
    view: Number
    generation: Number
    shard: Number


# Coordinator to task ---------------------------------------------------------------------------


class Joined(Message, frozen=True, array_like=True):
    """The task is a member now.

    Attributes:
        incarnation: the number of this start of the task.
        heartbeat_interval: the seconds between two heartbeats.
        heartbeat_timeout: after so many seconds of silence each side gives the other up.
        epoch: the epoch of the job. Every later handshake of the task names it.
        term: the number of this start of the coordinator within the epoch.
        rejoin_timeout: the task goes on for so many seconds without a coordinator before it
            gives the job up.
    """

    kind: ClassVar[int] = 17
    incarnation: int
    heartbeat_interval: float
    heartbeat_timeout: float
    epoch: str = ""
    term: int = 1
    rejoin_timeout: float = 600.0


class Refused(Message, frozen=True, array_like=True):
    """The task may not join, or the job is not scaled so. `code` and `reason` say why."""

    kind: ClassVar[int] = 18
    code: Refusal
    reason: str


class HeartbeatHeard(Message, frozen=True, array_like=True):
    """The answer to `Heartbeat`: the coordinator is alive too."""

    kind: ClassVar[int] = 20


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
    """The job has ended. Answered by `JobOverHeard`.

    Attributes:
        outcome: how it ended.
        culprit: the name of the task that failed first; "" for `finished`.
        reason: why, in a line.
    """

    kind: ClassVar[int] = 26
    outcome: Outcome
    culprit: str
    reason: str


class Dismissed(Message, frozen=True, array_like=True):
    """The job goes on without the task: it finishes its update, and leaves. `reason` says why.

    A server hears it once no shard lies on it any more.
    """

    kind: ClassVar[int] = 31
    reason: str


class Interrupted(Message, frozen=True, array_like=True):
    """The job stops before its end: the worker ends at a step that all agree on, which is saved.

    Attributes:
        reason: why, in a line.
    """

    kind: ClassVar[int] = 41
    reason: str


# Anybody to coordinator ------------------------------------------------------------------------


class StatusQuery(Message, frozen=True, array_like=True):
    """Asks for the job's status. Answered by `ClusterStatus`."""

    kind: ClassVar[int] = 32


class Scale(Message, frozen=True, array_like=True):
    """Asks for other numbers of tasks. Answered by `Scaled`, or by `Refused`.

    Attributes:
        servers: how many parameter servers the job shall have; None for as many as now.
        workers: how many workers, likewise.
    """

    kind: ClassVar[int] = 34
    servers: Index | None = None
    workers: Index | None = None


class Scaled(Message, frozen=True, array_like=True):
    """The answer to `Scale`.

    Attributes:
        servers, workers: how many tasks of each role the job shall have now.
        awaited: the names of the tasks that the job has room for and that have no process: whoever
            starts tasks starts these.
        dismissed: the names of the tasks that are to leave, and have not left yet.
    """

    kind: ClassVar[int] = 35
    servers: int
    workers: int
    awaited: tuple[str, ...]
    dismissed: tuple[str, ...]


class TaskStatus(msgspec.Struct, frozen=True, array_like=True):
    """One task, as the coordinator sees it.

    Attributes:
        role: `ps` or `worker`.
        index: the task's index.
        state: the task's state; `reason` says why.
        reason: the last thing that happened to it.
        incarnation: the number of its latest start; 0 if it never joined.
        host, pid, address: as that process reported them when it joined.
        quiet_seconds: how long ago it was last heard; -1 if never.
        status: the status of its last heartbeat.
        dismissed: whether it is to leave, because the job was made smaller.
    """

    role: str
    index: int
    state: TaskState
    reason: str
    incarnation: int
    host: str
    pid: int
    address: str
    quiet_seconds: float
    status: dict[str, StatusValue]
    dismissed: bool = False


class ClusterStatus(Message, frozen=True, array_like=True):
    """The answer to `StatusQuery`.

    Attributes:
        phase: the job's phase.
        reason: why it is in this phase.
        view: the number of the newest view; 0 before the first.
        missing: the names of the tasks that the job waits for.
        tasks: every task, servers first.
        term: the number of this start of the coordinator within the job.
        replicas: how many servers shall hold each shard.
        servers, workers: how many tasks of each role the job shall have.
        shards, generation, next_shards, life: as in the newest view.
        whole: whether every shard has all its copies, and no reconfiguration is under way or due
            for want of copies.
    """

    kind: ClassVar[int] = 33
    phase: Phase
    reason: str
    view: int
    missing: tuple[str, ...]
    tasks: tuple[TaskStatus, ...]
    term: int = 1
    replicas: int = 1
    servers: int = 0
    workers: int = 0
    shards: tuple[ShardEntry, ...] = ()
    generation: int = 1
    next_shards: tuple[ShardEntry, ...] = ()
    life: int = 0
    whole: bool = True


CLUSTER_MESSAGES = tuple(kind for kind in Message.__subclasses__() if kind.__module__ == __name__)
"""Every message type of this module."""

CLUSTER_CATALOG = Catalog(CLUSTER_MESSAGES)
