"""What the supervision of a job knows of it, and the actions that it asks its launcher for."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from trireme.launch.exit_reason import ExitReason
from trireme.launch.verdict import Failure


@dataclass(frozen=True, slots=True)
class Terminate:
    """Ask a task to end, with SIGTERM."""

    name: str


@dataclass(frozen=True, slots=True)
class Kill:
    """End a task and its children at once, with SIGKILL."""

    name: str


@dataclass(frozen=True, slots=True)
class StopJob:
    """Have the coordinator stop the job before its end."""


@dataclass(frozen=True, slots=True)
class Start:
    """Start a task that the job has room for."""

    name: str


@dataclass(frozen=True, slots=True)
class Restart:
    """Start a task again."""

    name: str


@dataclass(frozen=True, slots=True)
class Notify:
    """Show a line to the user."""

    text: str


Action = Terminate | Kill | StopJob | Start | Restart | Notify


class Phase(enum.Enum):
    """How far the supervision of a job is."""

    STARTING = "starting"
    """All tasks are to be started, for the first time or again."""
    RUNNING = "running"
    RESTARTING = "restarting"
    """Tasks are to end, before they are started again together."""
    STOPPING = "stopping"
    FAILING = "failing"
    ENDING = "ending"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class SupervisionLimits:
    """How long supervision lets things take, in seconds, and how often tasks are started again.

    Attributes:
        restarts: how often each worker may be started again, and each server, if the job outlives
            it; and how often the whole job may be, when a server died that the job does not
            outlive.
        outlives_servers: whether the job goes on when a server is lost: others hold copies of what
            it held.
        coordinated: whether the job has a coordinator, which decides who takes part.
        settle: how long the other tasks may take to end by themselves after a failure. It is
            longer than the coordinator needs to notice that a task is gone.
        give_up: how long servers may take to end by themselves after the last worker of a job that
            failed. They have nothing to lose.
        stop: how long the workers may take to save and end after a request to stop.
        end: how long servers may take to end after the last worker.
        idle: how long a worker that outlives the job may do nothing, which means that it uses less
            than a hundredth of a core and prints nothing.
        kill: the time between SIGTERM and SIGKILL where nothing has to be saved, and the time
            after SIGKILL until a task that does not die is given up.
        echo: two requests to stop that are closer to each other than this count as one: `timeout`
            and some process managers signal a process and then its whole group.
        together: whether the workers hold the model together. If so, none can go on without the
            others, and all of them are started again.
        regroup: how long the other workers may take to notice that one has failed, where they hold
            the model together.
        save: how long the other tasks may take to save and end before the whole job is started
            again.
    """

    restarts: int = 0
    outlives_servers: bool = False
    coordinated: bool = False
    settle: float = 5.0
    give_up: float = 1.0
    stop: float = 60.0
    end: float = 15.0
    idle: float = 60.0
    kill: float = 10.0
    echo: float = 0.2
    together: bool = False
    regroup: float = 3.0
    save: float = 30.0


@dataclass(slots=True)
class SupervisedTask:
    """A task that was started, and what the supervision has decided about it.

    Attributes:
        name: the task's name, such as `worker:1`.
        alive: whether its process runs.
        terminated: whether SIGTERM was sent to it.
        killed: whether SIGKILL was sent to it.
        finished: whether it is a worker that ended by itself, finished or interrupted.
        status: the status with which it ended last; None before that.
        dismissed: whether it is to leave, because the job was made smaller, or has left for that.
        awaited: whether another process is to take its place as soon as it has ended, because the
            job was made smaller and then larger again.
        restarts: how often it was started again by itself or with the other workers.
        given_up: why it is killed, or was; None unless it is given up although its process lives.
        due: when it is killed for that, and after SIGKILL, when it counts as ended; None for never.
        used: how much it had done at the time `active_at`.
        active_at: when it was last seen to do anything after the job's end; None before that.
    """

    name: str
    alive: bool = True
    terminated: bool = False
    killed: bool = False
    finished: bool = False
    status: int | None = None
    dismissed: bool = False
    awaited: bool = False
    restarts: int = 0
    given_up: ExitReason | None = None
    due: float | None = None
    used: float = 0.0
    active_at: float | None = None

    def start(self) -> None:
        """Marks the task as started, for the first time or again."""
        self.alive, self.terminated, self.killed, self.finished = True, False, False, False
        self.given_up = self.due = self.active_at = None

    def restart(self) -> Restart:
        """Starts the task again, and counts that."""
        self.restarts += 1
        self.start()
        return Restart(self.name)

    def terminate(self) -> Terminate:
        """Asks the task to end."""
        self.terminated = True
        return Terminate(self.name)

    def kill(self, due: float | None = None) -> Kill:
        """Kills the task. After `due` it counts as ended even if its process lives."""
        self.killed, self.due = True, due
        return Kill(self.name)

    @property
    def worker(self) -> bool:
        """Whether the task is a worker."""
        return self.name.startswith("worker:")

    @property
    def server(self) -> bool:
        """Whether the task is a parameter server."""
        return self.name.startswith("ps:")


@dataclass(slots=True)
class JobStart:
    """What is known of the begin of a job.

    Attributes:
        joined: whether a worker ever joined; None while that is not known.
        formed: whether all tasks have joined.
        absent: a worker that ended before the job had begun; None where there is none.
        deadline: until when the job may still turn out to have begun without that worker.
    """

    joined: bool | None = None
    formed: bool = False
    absent: Failure | None = None
    deadline: float | None = None

    def take_absence(self) -> Failure | None:
        """Returns the worker that was noted, and forgets it."""
        absent, self.absent, self.deadline = self.absent, None, None
        return absent
