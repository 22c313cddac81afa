"""The coordinator's state, as values: a job's policy, its tasks, its phase; and how it is changed.

A decision is a new state, and instructions with a reason.
"""

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
from trireme.cluster.spec import task_name
from trireme.cluster.view import View
from trireme.errors import ConfigurationError
from trireme.wire.message import Message


@dataclass(frozen=True, slots=True)
class Policy:
    """What a job expects of its tasks. Times are in seconds.

    Attributes:
        workers: how many workers the first view needs.
        servers: how many parameter servers the first view needs.
        join_timeout: how long the tasks may take to join before the job fails.
        heartbeat_interval: the time between two heartbeats of a task.
        heartbeat_timeout: how long a task may send nothing before it is lost.
        reconnect_grace: how long a task whose connection closed may take to come back before it
            is lost.
        end_grace: how long the coordinator stays to inform every task that the job is over.
        notice_interval: how often the tasks are informed which ones the job waits for.
        wait_for_restart: how long the job waits for the new process of a lost worker before it
            fails, because all workers are lost. 0 where nothing starts one.
        progress_timeout: how long a worker that lives may make no step, without an excuse, before
            it is lost; 0 for ever. See `trireme.cluster.progress`.
        replicas: how many servers hold each shard of the parameters.
        slots: into how many slots the parameters are cut, at least one for each server.

    Raises:
        ConfigurationError: a count or a time is out of range.
    """

    workers: int
    servers: int
    join_timeout: float = 300.0
    heartbeat_interval: float = 1.0
    heartbeat_timeout: float = 10.0
    reconnect_grace: float = 2.0
    end_grace: float = 5.0
    notice_interval: float = 5.0
    wait_for_restart: float = 0.0
    progress_timeout: float = 600.0
    replicas: int = 1
    slots: int = 256

    def __post_init__(self) -> None:
        if self.workers < 1 or self.servers < 0:
            raise ConfigurationError(
                f"{self.workers} workers and {self.servers} servers: a job has at least 1 worker "
                "and 0 servers"
            )
        if self.replicas < 1 or self.replicas > max(1, self.servers):
            raise ConfigurationError(
                f"replicas is {self.replicas}: it must be from 1 to the number of servers, which "
                f"is {self.servers}"
            )
        if self.slots < max(1, self.servers):
            raise ConfigurationError(
                f"slots is {self.slots}: there must be at least one for each of the "
                f"{self.servers} servers"
            )
        for name in ("join_timeout", "heartbeat_interval", "notice_interval"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} is {getattr(self, name)}: it must be above 0")
        for name in ("reconnect_grace", "end_grace", "wait_for_restart", "progress_timeout"):
            if not getattr(self, name) >= 0:
                raise ConfigurationError(f"{name} is {getattr(self, name)}: it must be 0 or more")
        if not self.heartbeat_timeout > self.heartbeat_interval:
            raise ConfigurationError(
                f"heartbeat_timeout is {self.heartbeat_timeout}: it must be above "
                f"heartbeat_interval, which is {self.heartbeat_interval}"
            )


class Task(msgspec.Struct, frozen=True):
    """One expected task and what is known of it.

    Attributes:
        role, index: which task it is.
        state: its state; `reason` says why it has this state, and `since` from when on.
        incarnation: the number of its latest start; 0 if it never joined.
        connection: the connection that it holds; None for none.
        host, pid, address: as its process reported them.
        heard: when it was last heard; the end of a connection counts too.
        outcome: how it left; None if it did not.
        status: the status of its last heartbeat.
        steps: how many steps it reports to have made; 0 where it reports none.
        moved: when it last reported a further step, or an excuse.
        usual: how many seconds its steps take; 0 where that is not known.
        late: whether it has made no step for several times as long; of a lost task, whether that
            is the reason.
    """

    role: str
    index: int
    state: TaskState = "expected"
    reason: str = "it has not come yet"
    since: float = 0.0
    incarnation: int = 0
    connection: int | None = None
    host: str = ""
    pid: int = 0
    address: str = ""
    heard: float = 0.0
    outcome: Outcome | None = None
    status: Mapping[str, StatusValue] = msgspec.field(default_factory=dict)
    steps: int = 0
    moved: float = 0.0
    usual: float = 0.0
    late: bool = False

    @property
    def name(self) -> str:
        """The task's name, such as `ps:0`."""
        return task_name(self.role, self.index)

    @property
    def active(self) -> bool:
        """Whether it is a member, which a task that is disconnected for now still is."""
        return self.state in ("live", "disconnected")

    def __str__(self) -> str:
        if not self.incarnation:
            return self.name
        return f"{self.name} (pid {self.pid} on {self.host})"


class State(msgspec.Struct, frozen=True):
    """Everything that the coordinator knows. `initial_state` makes the first one.

    Attributes:
        policy: what the job expects of its tasks.
        epoch: the epoch of the job: every start has another.
        term: the number of this start of the coordinator within the epoch, from 1.
        started: when the job began to form.
        tasks: every expected task by name, servers first.
        phase: the job's phase.
        reason: why it is in this phase.
        view: the newest view; None before the first.
        over: the message that informs every task of the job's end; None before it.
        over_since: when the job ended.
        noticed: when the tasks were last informed which ones the job waits for.
    """

    policy: Policy
    started: float
    tasks: Mapping[str, Task]
    epoch: str = ""
    term: int = 1
    phase: Phase = "forming"
    reason: str = "it waits for its tasks"
    view: View | None = None
    over: JobOver | None = None
    over_since: float = 0.0
    noticed: float = 0.0

    def of(self, role: str) -> list[Task]:
        """Returns the tasks of a role, by index."""
        return [task for task in self.tasks.values() if task.role == role]

    def holder(self, connection: int) -> Task | None:
        """Returns the task that holds a connection; None if none does."""
        return next((task for task in self.tasks.values() if task.connection == connection), None)


def initial_state(now: float, policy: Policy, epoch: str = "", term: int = 1) -> State:
    """Returns the state of a job that begins to form now."""
    tasks = [Task("ps", index) for index in range(policy.servers)]
    tasks += [Task("worker", index) for index in range(policy.workers)]
    by_name = {task.name: task for task in tasks}
    return State(policy, now, by_name, epoch=epoch, term=term, noticed=now)


def missing(state: State) -> list[Task]:
    """Returns the tasks that the job waits for.

    While it forms, these are all tasks that are not live. Later they are the lost workers, if no
    worker is left.
    """
    if state.phase == "forming":
        return [task for task in state.tasks.values() if task.state != "live"]
    workers = state.of("worker")
    if state.phase != "running" or any(worker.active for worker in workers):
        return []
    return [worker for worker in workers if worker.state == "lost"]


def everybody_told(now: float, state: State) -> bool:
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
    return ClusterStatus(
        phase=state.phase,
        reason=state.reason,
        view=state.view.number if state.view else 0,
        missing=tuple(task.name for task in missing(state)),
        tasks=tuple(_task_status(now, task) for task in state.tasks.values()),
    )


def _task_status(now: float, task: Task) -> TaskStatus:
    return TaskStatus(
        role=task.role,
        index=task.index,
        state=task.state,
        reason=task.reason,
        incarnation=task.incarnation,
        host=task.host,
        pid=task.pid,
        address=task.address,
        quiet_seconds=now - task.heard if task.incarnation else -1.0,
        status=dict(task.status),
    )


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message on a connection."""

    connection: int
    message: Message


@dataclass(frozen=True, slots=True)
class Close:
    """Close a connection after earlier messages are sent. No `Closed` event needs to follow."""

    connection: int


Instruction = Send | Close


class Decision(NamedTuple):
    """The result of an event.

    Attributes:
        state: the new state.
        instructions: what to do, in this order.
        reason: why, for the log; not empty where there are instructions.
    """

    state: State
    instructions: tuple[Instruction, ...]
    reason: str


class DecisionBuilder:
    """Builds one decision. It exists only during one `step`, and is the only mutable object.

    Attributes:
        now: the time of the event.
        state: the state so far.
        newcomer: the connection of a task that has just joined and must be informed.
    """

    def __init__(self, now: float, state: State) -> None:
        self.now = now
        self.state = state
        self.newcomer: int | None = None
        self._instructions: list[Instruction] = []
        self._reasons: list[str] = []

    def decision(self) -> Decision:
        """Returns the decision."""
        return Decision(self.state, tuple(self._instructions), "; ".join(self._reasons))

    def update_task(self, task: Task) -> None:
        """Replaces a task in the state."""
        self.state = replace(self.state, tasks={**self.state.tasks, task.name: task})

    def add_reason(self, reason: str) -> None:
        """Adds to the decision's reason."""
        self._reasons.append(reason)

    def send(self, connection: int, message: Message) -> None:
        """Adds an instruction to send."""
        self._instructions.append(Send(connection, message))

    def close(self, connection: int) -> None:
        """Adds an instruction to close."""
        self._instructions.append(Close(connection))

    def broadcast(self, message: Message) -> None:
        """Adds instructions to send to every connected task."""
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
        self.newcomer = None
        self.add_reason(f"the job is over, {over.outcome}: {over.reason}")
        self.broadcast(over)
