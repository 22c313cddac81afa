"""What tasks and the coordinator say to each other. Kinds 16 to 63.

A task joins once per connection; from then on both sides speak when they have something to say.
Only `StatusQuery` and `Stop` are requests with a reply, which carries their frame's sequence.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from trireme.cluster.view import View
from trireme.wire.message import Catalog, Index, Message, Name, Number

__all__ = [
    "CLUSTER_CATALOG",
    "CLUSTER_MESSAGES",
    "MAX_DETAILS",
    "ClusterStatus",
    "Heartbeat",
    "HeartbeatHeard",
    "JobOver",
    "JobOverHeard",
    "Join",
    "Joined",
    "Leave",
    "Left",
    "Outcome",
    "Phase",
    "Refusal",
    "Refused",
    "StatusQuery",
    "StatusValue",
    "Stop",
    "StopRequested",
    "TaskState",
    "TaskStatus",
    "ViewChanged",
    "WaitingFor",
    "clip_details",
]

Outcome = Literal["finished", "interrupted", "failed"]
"""How a task, and the whole job, may end."""

Phase = Literal["forming", "running", "finished", "interrupted", "failed"]
"""How far a job is."""

TaskState = Literal["expected", "live", "disconnected", "lost", "left"]
"""How a task is: not come yet; connected; cut off for now; given up; gone by its own word."""

Refusal = Literal["outside", "claimed", "superseded", "unknown", "deposed"]
"""Why a task may not join: it is not of this cluster; another process holds it; another process
has taken it over; the coordinator never gave out its incarnation; a coordinator of a later term
has replaced this one."""

MAX_LINE = 16 << 10
"""The most characters of a `Line`."""

Line = Annotated[str, msgspec.Meta(max_length=MAX_LINE)]
"""A line for people to read."""

StatusValue = float | Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)] | Line
"""What a heartbeat may say about a task, by name."""

MAX_DETAILS = 64 << 10
"""The most bytes of a failure's details (UTF-8) that travel."""


def clip_details(details: str) -> str:
    """Cuts the details of a failure down to `MAX_DETAILS` bytes, keeping the end.

    The end of a traceback names the error; its beginning only the way there.
    """
    encoded = details.encode("utf-8", "replace")
    if len(encoded) <= MAX_DETAILS:
        return encoded.decode()
    notice = f"[the first part of {len(encoded)} bytes is left out]\n"
    kept = encoded[-(MAX_DETAILS - len(notice)) :]
    return notice + kept.decode("utf-8", "ignore")


# Task to coordinator ---------------------------------------------------------------------------


class Join(Message, frozen=True, array_like=True):
    """A task says who it is. Answered by `Joined`, `Refused` or, if that is so, `JobOver`.

    Attributes:
        role: `ps` or `worker`.
        index: the task's index.
        incarnation: 0 for a process that joins for the first time; the one that it was given,
            for a process whose connection broke.
        host: the name of its host.
        pid: its process id there.
        address: where it listens, with its scheme; "" if it does not.
        term: the coordinator's, as the process last heard it; 0 for one that joins for the first
            time. A coordinator of an earlier term was replaced, and takes nobody in.
    """

    kind: ClassVar[int] = 16
    role: Name
    index: Index
    incarnation: Number
    host: Name
    pid: Number
    address: Name
    term: Number = 0


class Heartbeat(Message, frozen=True, array_like=True):
    """The task is alive. `status` is the latest of what it has to say about itself."""

    kind: ClassVar[int] = 19
    status: Annotated[dict[Name, StatusValue], msgspec.Meta(max_length=4096)]


class Leave(Message, frozen=True, array_like=True):
    """The task ends. Answered by `Left`.

    Attributes:
        outcome: how it ended.
        reason: in a line; for `failed`, the error.
        details: for `failed`, the traceback; at most `MAX_DETAILS` bytes.
    """

    kind: ClassVar[int] = 24
    outcome: Outcome
    reason: Annotated[str, msgspec.Meta(max_length=MAX_DETAILS)] = ""
    details: Annotated[str, msgspec.Meta(max_length=MAX_DETAILS)] = ""


class JobOverHeard(Message, frozen=True, array_like=True):
    """The answer to `JobOver`; nothing comes after it."""

    kind: ClassVar[int] = 27


# Coordinator to task ---------------------------------------------------------------------------


class Joined(Message, frozen=True, array_like=True):
    """The task takes part.

    Attributes:
        incarnation: which start of this task the process is.
        heartbeat_interval: send a heartbeat this often, in seconds.
        heartbeat_timeout: after so many seconds of silence either side gives the other up.
        epoch: which start of the job this is. Every handshake of the task names it from now on.
        term: which start of the coordinator within it.
    """

    kind: ClassVar[int] = 17
    incarnation: int
    heartbeat_interval: float
    heartbeat_timeout: float
    epoch: str = ""
    term: int = 1


class Refused(Message, frozen=True, array_like=True):
    """The task may not take part."""

    kind: ClassVar[int] = 18
    code: Refusal
    reason: str


class HeartbeatHeard(Message, frozen=True, array_like=True):
    """The answer to `Heartbeat`: the coordinator is alive too."""

    kind: ClassVar[int] = 20


class ViewChanged(Message, frozen=True, array_like=True):
    """Here is the newest view."""

    kind: ClassVar[int] = 21
    view: View


class WaitingFor(Message, frozen=True, array_like=True):
    """The job cannot go on before these tasks have come; it fails in so many seconds."""

    kind: ClassVar[int] = 22
    names: tuple[str, ...]
    deadline_seconds: float


class StopRequested(Message, frozen=True, array_like=True):
    """Somebody asked that the job be saved and stopped."""

    kind: ClassVar[int] = 23
    reason: str


class Left(Message, frozen=True, array_like=True):
    """The answer to `Leave`."""

    kind: ClassVar[int] = 25


class JobOver(Message, frozen=True, array_like=True):
    """The job has ended. Answered by `JobOverHeard`.

    Attributes:
        outcome: how.
        culprit: the name of the task that failed first; "" for `finished`.
        reason: why, in a line.
        details: the culprit's traceback, if it left one.
    """

    kind: ClassVar[int] = 26
    outcome: Outcome
    culprit: str
    reason: str
    details: str = ""


# Anybody to coordinator ------------------------------------------------------------------------


class StatusQuery(Message, frozen=True, array_like=True):
    """Asks how the job is. Answered by `ClusterStatus`."""

    kind: ClassVar[int] = 32


class TaskStatus(msgspec.Struct, frozen=True, array_like=True):
    """One task, as the coordinator sees it.

    Attributes:
        role: `ps` or `worker`.
        index: the task's index.
        state: how it is; `reason` says why.
        reason: the last thing that happened to it.
        incarnation: which start of this task is or was the latest; 0 if it never came.
        host, pid, address: what that process said of itself when it joined.
        quiet_seconds: how long ago it was last heard; -1 if never.
        status: what its last heartbeat said.
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


class ClusterStatus(Message, frozen=True, array_like=True):
    """The answer to `StatusQuery` and to `Stop`.

    Attributes:
        phase: how far the job is.
        reason: why it is in this phase.
        view: the number of the newest view; 0 before the first.
        missing: the names of the tasks that the job waits for.
        stop: why the job was asked to stop; None if it was not.
        tasks: every task, servers first.
    """

    kind: ClassVar[int] = 33
    phase: Phase
    reason: str
    view: int
    missing: tuple[str, ...]
    stop: str | None
    tasks: tuple[TaskStatus, ...]


class Stop(Message, frozen=True, array_like=True):
    """Asks that the job be saved and stopped. Answered by `ClusterStatus`."""

    kind: ClassVar[int] = 34
    reason: Line


CLUSTER_MESSAGES: tuple[type[Message], ...] = (
    Join,
    Joined,
    Refused,
    Heartbeat,
    HeartbeatHeard,
    ViewChanged,
    WaitingFor,
    StopRequested,
    Leave,
    Left,
    JobOver,
    JobOverHeard,
    StatusQuery,
    ClusterStatus,
    Stop,
)
CLUSTER_CATALOG = Catalog(CLUSTER_MESSAGES)
