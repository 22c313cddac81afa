"""The coordinator's state, as values: a job's policy, its tasks, its phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from trireme.cluster.messages import (
    ClusterStatus,
    JobOver,
    Outcome,
    Phase,
    StatusValue,
    TaskState,
    TaskStatus,
)
from trireme.cluster.placement import Shards, is_whole
from trireme.cluster.spec import task_name
from trireme.cluster.view import View
from trireme.wire.message import Message


@dataclass(frozen=True, slots=True)
class Policy:
    """What a job expects of its tasks. Times are in seconds; the configuration has checked them."""

    workers: int  # that the first view needs
    servers: int
    join_timeout: float = 300.0  # how long the tasks may take to join before the job fails
    heartbeat_interval: float = 1.0
    heartbeat_timeout: float = 10.0  # how long a task may send nothing before it is lost
    reconnect_grace: float = 2.0  # how long one that is cut off may take to come back
    end_grace: float = 5.0  # how long the coordinator stays to inform every task of the end
    settle: float = 2.0  # how long a worker that a signal asks to leave waits for signals to others
    notice_interval: float = 5.0  # between notices which tasks the job waits for
    wait_for_restart: float = 0.0  # how long a lost worker's new process is awaited; 0: none comes
    progress_timeout: float = 600.0  # how long a worker may make no step; 0 for ever
    replicas: int = 1  # how many servers hold each shard
    slots: int = 256  # into which the parameters are cut, at least one for each server
    survives_loss: bool = False  # of all copies of a shard: it goes back to its checkpoint
    elastic: bool = False  # whether it may be scaled, and further tasks may join it
    rejoin_timeout: float = 600.0  # how long a task that is cut off tries to come back


class Pace(msgspec.Struct, frozen=True):
    """How a task goes on; see `trireme.cluster.progress`."""

    moved: float = 0.0  # when it last reported a further step, or an excuse
    steps: int = 0  # that it reports to have made; 0 where it reports none
    usual: float = 0.0  # how many seconds its steps take; 0 where that is not known
    late: bool = False  # no step for several times as long; of a lost task: that is the reason


class Task(msgspec.Struct, frozen=True):
    """One expected task and what is known of it."""

    role: str
    index: int
    state: TaskState = "expected"
    reason: str = "it has not come yet"
    since: float = 0.0  # it has this state
    incarnation: int = 0  # of its latest start; 0 if it never joined
    connection: int | None = None
    host: str = ""
    pid: int = 0
    address: str = ""
    heard: float = 0.0  # when it was last heard; the end of a connection counts too
    hears: float = 0.0  # when the coordinator gave the last answer that it has received
    outcome: Outcome | None = None  # how it left
    saved: int | None = None  # the last step, once it has saved it as the chief
    status: Mapping[str, StatusValue] = msgspec.field(default_factory=dict)
    pace: Pace = Pace()
    start: int = 0  # the random number of its process
    dismissed: bool = False  # it is to leave, because the job was made smaller
    notified: bool = False  # it knows that it leaves
    silent: bool = False  # nothing is heard of its host: its process may live, and come back
    signal: tuple[str, float] | None = None  # that asks its process to end, and when we heard of it

    @property
    def name(self) -> str:
        return task_name(self.role, self.index)

    @property
    def departs(self) -> bool:
        """Whether a signal has it leave alone: another process may take its place."""
        return self.notified and not self.dismissed

    @property
    def active(self) -> bool:
        """Whether it is a member, which a task that is disconnected for now still is."""
        return self.state in ("live", "disconnected")

    def __str__(self) -> str:
        if not self.incarnation:
            return self.name
        return f"{self.name} (pid {self.pid} on {self.host})"


class Reconfiguration(msgspec.Struct, frozen=True):
    """A reconfiguration under way: the view has `next_shards`."""

    view: int  # the newest that announces it
    since: float  # the first one did
    ready: tuple[int, ...] = ()  # the shards that have stopped at the cut of the newest view


class State(msgspec.Struct, frozen=True):
    """Everything that the coordinator knows. `initial_state` makes the first one."""

    policy: Policy
    started: float  # when the job began to form
    tasks: Mapping[str, Task]  # by name, servers first
    epoch: str = ""  # of the job: every start has another
    term: int = 1  # the number of this start of the coordinator within the epoch
    phase: Phase = "forming"
    reason: str = "it waits for its tasks"
    view: View | None = None
    over: JobOver | None = None  # informs every task of the job's end
    over_since: float = 0.0
    noticed: float = 0.0  # when the tasks were last informed which ones the job waits for
    reconfiguration: Reconfiguration | None = None
    plan_after: float = 0.0  # no reconfiguration is planned before
    requests: int = 0  # how often somebody has asked for other numbers of tasks
    stopping: str = ""  # why the job stops before its end
    resumed: float | None = None  # when this coordinator took over from an earlier one
    shunned: Mapping[int, tuple[float, int]] = msgspec.field(default_factory=dict)
    """The servers with a broken link: until when they get no copies, and how often in a row."""
    unlinked: Mapping[int, tuple[float, float]] = msgspec.field(default_factory=dict)
    """By the server that would lose its copies: when its link was first and last reported."""

    def of(self, role: str) -> list[Task]:
        """Returns the tasks of a role, by index."""
        return [task for task in self.tasks.values() if task.role == role]

    def wanted(self, role: str) -> list[Task]:
        """Returns the tasks of a role that the job shall have, and that have not left, by index."""
        return [task for task in self.of(role) if not task.dismissed and task.state != "left"]

    def left_to_go_on(self, role: str) -> list[Task]:
        """Returns the tasks of a role that are members and were not told to leave, by index."""
        return [task for task in self.of(role) if task.active and not task.notified]

    @property
    def holders(self) -> set[int]:
        """The servers that still hold what the newest view says they do."""
        entries = self.view.servers if self.view else ()
        servers = {(task.index, task.incarnation) for task in self.of("ps") if task.active}
        return {each.index for each in entries if (each.index, each.incarnation) in servers}

    def holder(self, connection: int) -> Task | None:
        """Returns the task that holds a connection; None if none does."""
        return next((task for task in self.tasks.values() if task.connection == connection), None)


def initial_state(now: float, policy: Policy, epoch: str = "") -> State:
    """Returns the state of a job that begins to form now."""
    tasks = [Task("ps", index) for index in range(policy.servers)]
    tasks += [Task("worker", index) for index in range(policy.workers)]
    by_name = {task.name: task for task in tasks}
    return State(policy, now, by_name, epoch=epoch, noticed=now)


def comes_back_until(policy: Policy, task: Task) -> float:
    """Returns until when a lost worker may come back: by itself, or as a process started again."""
    patience = policy.wait_for_restart
    if task.silent and task.role == "worker":
        patience = max(patience, policy.rejoin_timeout)
    return task.since + patience


def missing(state: State) -> list[Task]:
    """Returns the tasks that the job waits for: to form, or for a role of which none is left."""
    if state.phase == "forming":
        tasks = state.tasks.values()
        return [task for task in tasks if task.state != "live" and not task.dismissed]
    if state.phase != "running":
        return []
    lost = list[Task]()
    for role in ("ps", "worker"):
        if not state.left_to_go_on(role):
            lost += [task for task in state.wanted(role) if task.state == "lost"]
    return lost


def everybody_informed(now: float, state: State) -> bool:
    """Returns whether the job is over and every task was informed, or `end_grace` has passed."""
    if state.over is None:
        return False
    if now - state.over_since >= state.policy.end_grace:
        return True
    return not any(
        task.connection is not None or task.state == "disconnected" for task in state.tasks.values()
    )


def cluster_status(now: float, state: State) -> ClusterStatus:
    """Returns the status that `trireme status` shows."""
    view = state.view or View(0, (), ())
    servers = len(state.wanted("ps"))
    return ClusterStatus(
        phase=state.phase,
        reason=state.reason,
        view=view.number,
        missing=tuple(task.name for task in missing(state)),
        tasks=tuple(_task_status(now, task) for task in state.tasks.values()),
        term=state.term,
        replicas=state.policy.replicas,
        servers=servers,
        workers=len(state.wanted("worker")),
        shards=view.shards,
        generation=view.generation,
        next_shards=view.next_shards,
        life=view.life,
        whole=not view.next_shards and is_whole(view.shards, servers, state.policy.replicas),
    )


def _task_status(now: float, task: Task) -> TaskStatus:
    who = task.role, task.index, task.state, task.reason, task.incarnation
    quiet = now - task.heard if task.incarnation else -1.0
    where = task.host, task.pid, task.address
    return TaskStatus(*who, *where, quiet, dict(task.status), task.dismissed)


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message on a connection; as the answer to a request, with its sequence."""

    connection: int
    message: Message
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class Close:
    """Close a connection after earlier messages are sent. No `Closed` event needs to follow."""

    connection: int


Instruction = Send | Close


class Decision(NamedTuple):
    """The new state, what to do in this order, and why: a line for each event."""

    state: State
    instructions: tuple[Instruction, ...]
    reason: str


class DecisionBuilder:
    """Builds one decision. It exists only during one `step`, and is the only mutable object."""

    def __init__(self, now: float, state: State) -> None:
        self.now = now
        self.state = state
        self.newcomers: list[int] = []  # connections of tasks that have just joined
        self.shards: Shards = ()  # of the newest view, if the event has changed them
        self._instructions: list[Instruction] = []
        self._reasons: list[list[str]] = []  # by event

    def decision(self) -> Decision:
        reason = "\n".join("; ".join(reasons) for reasons in self._reasons if reasons)
        return Decision(self.state, tuple(self._instructions), reason)

    def update_task(self, task: Task) -> None:
        self.state = replace(self.state, tasks={**self.state.tasks, task.name: task})

    def begin_event(self) -> None:
        """Begins another line of the reason."""
        self._reasons.append([])

    def add_reason(self, reason: str) -> None:
        if not self._reasons:
            self.begin_event()
        self._reasons[-1].append(reason.replace("\n", " "))

    def send(self, connection: int, message: Message, sequence: int = 0) -> None:
        self._instructions.append(Send(connection, message, sequence))

    def close(self, connection: int) -> None:
        self._instructions.append(Close(connection))

    def broadcast(self, message: Message) -> None:
        for task in self.state.tasks.values():
            if task.connection is not None:
                self.send(task.connection, message)

    def end(self, over: JobOver) -> None:
        """Ends the job and informs every task. Does nothing if the job has ended already."""
        if self.state.over is not None:
            return
        self.state = replace(
            self.state, phase=over.outcome, reason=over.reason, over=over, over_since=self.now
        )
        self.newcomers.clear()
        self.add_reason(f"the job is over, {over.outcome}: {over.reason}")
        self.broadcast(over)
