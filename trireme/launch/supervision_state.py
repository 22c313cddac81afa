"""What the supervision of a job knows of it, and the actions that it asks its launcher for."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from trireme.launch.exit_reason import ExitReason
from trireme.launch.verdict import Failure, Verdict

ACTIVE_SHARE = 0.01
"""The share of a core above which a process counts as active."""


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
    """How long supervision lets things take, in seconds, and how often tasks are started again."""

    restarts: int = 0
    """How often each worker may be started again, and each server that the job outlives; and how
    often the whole job, when a server died that it does not outlive."""
    outlives_servers: bool = False  # others hold copies of what a server held
    coordinated: bool = False  # a coordinator decides who takes part
    together: bool = (
        False  # workers hold the model together: all of them are started again, or none
    )
    settle: float = 5.0
    """How long the others may take to end by themselves after a failure: longer than the
    coordinator needs to notice that a task is gone."""
    regroup: float = 3.0  # likewise, of workers that hold the model together
    give_up: float = 1.0  # how long servers may take after the last worker of a job that failed
    stop: float = 60.0  # how long workers may take to save and end after a request to stop
    save: float = 30.0  # likewise, before the whole job is started again
    end: float = 15.0  # how long servers may take to end after the last worker
    idle: float = 60.0
    """How long a worker that outlives the job may use less than a hundredth of a core and print
    nothing."""
    kill: float = 10.0
    """The time from SIGTERM to SIGKILL where nothing has to be saved, and from SIGKILL until a task
    that does not die is given up."""
    echo: float = 0.2
    """Two requests to stop that are closer to each other count as one: `timeout` and some process
    managers signal a process and then its whole group."""


@dataclass(slots=True)
class SupervisedTask:
    """A task that was started, and what the supervision has decided about it."""

    name: str
    alive: bool = True
    terminated: bool = False  # SIGTERM was sent to it
    killed: bool = False  # SIGKILL was
    finished: bool = False  # it is a worker that ended by itself, finished or interrupted
    status: int | None = None  # with which it ended last
    dismissed: bool = False  # it is to leave as the job was made smaller, or has left for that
    awaited: bool = False  # another process takes its place, as the job was made larger again
    restarts: int = 0  # by itself, or with the other workers
    given_up: ExitReason | None = None  # why it is killed although its process lives
    due: float | None = None  # when it is killed for that; after SIGKILL: when it counts as ended
    used: float = 0.0  # how much it had done at `active_at`
    active_at: float | None = None  # when it was last seen to do anything after the job's end

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

    def is_idle(self, now: float, used: float, idle: float) -> bool:
        """Notes how much it has done by now; returns if it has done nothing for `idle` seconds."""
        if self.active_at is None or used - self.used >= ACTIVE_SHARE * idle:
            self.active_at, self.used = now, used
        return now - self.active_at >= idle

    @property
    def worker(self) -> bool:
        """Whether the task is a worker."""
        return self.name.startswith("worker:")

    @property
    def server(self) -> bool:
        """Whether the task is a parameter server."""
        return self.name.startswith("ps:")


class TaskTable(dict[str, SupervisedTask]):
    """The tasks that were started, by name."""

    @property
    def alive(self) -> list[SupervisedTask]:
        """Those that live."""
        return [task for task in self.values() if task.alive]

    @property
    def workers(self) -> list[SupervisedTask]:
        """The workers."""
        return [task for task in self.values() if task.worker]

    @property
    def alive_workers(self) -> list[SupervisedTask]:
        """The workers that live."""
        return [task for task in self.workers if task.alive]


@dataclass(slots=True)
class Restarts:
    """How often tasks may be started again, and the restart of several that is under way."""

    limits: SupervisionLimits
    tasks: list[SupervisedTask] = field(default_factory=list)
    causes: list[Failure] = field(default_factory=list)  # the failures that made it necessary
    whole: int = 0  # how often the whole job was started again

    def left(self, task: SupervisedTask) -> int:
        """Returns how often a task may still be started again."""
        by_itself = task.worker or self.limits.outlives_servers
        return self.limits.restarts - task.restarts if by_itself else self.whole_left

    @property
    def whole_left(self) -> int:
        """How often the whole job may still be started again."""
        return self.limits.restarts - self.whole

    def counted(self, before: int) -> str:
        """Returns the number of a restart, such as `(1 of 3)`."""
        return f"({before + 1} of {self.limits.restarts})"

    @property
    def alive(self) -> list[SupervisedTask]:
        """The tasks that have to end first."""
        return [task for task in self.tasks if task.alive]

    @property
    def first_cause(self) -> Failure:
        """The failure that came first. One by itself comes before any that another one caused."""
        own = [failure for failure in self.causes if failure.reason.kind != "victim"]
        return min(own or self.causes, key=lambda failure: failure.reason.at)


@dataclass(slots=True)
class JobStart:
    """What is known of the begin of a job."""

    joined: bool | None = None  # whether a worker ever joined, once that is known
    formed: bool = False  # all tasks have joined
    absent: Failure | None = None  # a worker that ended before the job had begun
    deadline: float | None = None  # until when the job may turn out to have begun without it

    def take_absence(self) -> Failure | None:
        """Returns the worker that was noted, and forgets it."""
        absent, self.absent, self.deadline = self.absent, None, None
        return absent


class JobState:
    """How far a job is, and how it will end, as far as that is known: `phase` and `verdict`."""

    def __init__(self, limits: SupervisionLimits) -> None:
        self.phase = Phase.STARTING
        self.verdict = Verdict()
        self._limits = limits
        self._tasks = TaskTable()
        self._phase_deadline: float | None = None
        self._restart = Restarts(limits)
        self._first_request: float | None = None  # when the launcher was first asked to stop
        self._saved_early = False  # a task ended with the status of an interrupted one
        self._last_worker: Failure | None = None  # the last worker, where it was lost
        self._job_over = False  # every task knows of the end
        self._start = JobStart()

    @property
    def goes_on(self) -> bool:
        """Whether the workers train, save, or are being started again."""
        phases = (Phase.RUNNING, Phase.RESTARTING, Phase.STOPPING)
        return self.phase in phases and not self._job_over

    @property
    def deadline(self) -> float | None:
        """When `tick` next has something to do; None for never."""
        times = [task.due for task in self._tasks.alive]
        if self.phase is Phase.RUNNING:
            times.append(self._start.deadline)
        times.append(self._phase_deadline)
        return min((time for time in times if time is not None), default=None)

    def restarts_left(self, name: str) -> int:
        """Returns how often a task may still be started again."""
        return self._restart.left(self._tasks[name])

    @property
    def whole_restarts_left(self) -> int:
        """How often the whole job may still be started again."""
        return self._restart.whole_left

    @property
    def names(self) -> tuple[str, ...]:
        """The name of every task that was started."""
        return tuple(self._tasks)

    @property
    def _ended_well(self) -> int:
        """How many workers ended by themselves, finished or interrupted."""
        return sum(task.finished and not task.dismissed for task in self._tasks.values())

    @property
    def _achieved(self) -> bool:
        """Whether a worker has ended well, even if it was killed before its process ended."""
        return self._ended_well > 0 or (self._job_over and bool(self._tasks.workers))

    def _fail(self, now: float, *failures: Failure) -> None:
        self.verdict.failures += failures
        self.verdict.failed = True
        if self.phase in (Phase.RUNNING, Phase.RESTARTING):
            together = self._limits.together
            self._phase_deadline = now + (self._limits.regroup if together else self._limits.settle)
        self.phase = Phase.FAILING

    def _kill(self, now: float, tasks: Iterable[SupervisedTask]) -> list[Action]:
        """Kills tasks. From now on the phase's deadline counts for them."""
        self._phase_deadline = now + self._limits.kill
        return [task.kill() for task in tasks]
