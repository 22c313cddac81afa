"""What the supervision of a job knows of its tasks, and the actions that it asks for."""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass

from trireme.launch.exit_reason import ExitReason


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
    """Start a task, again or because the job has room for it."""

    name: str


@dataclass(frozen=True, slots=True)
class Notify:
    """Show a line to the user."""

    text: str


Action = Terminate | Kill | StopJob | Start | Notify


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
    # workers hold the model together: all of them are started again, or none
    together: bool = False
    settle: float = 5.0
    """How long the others may take to end by themselves after a failure: longer than the
    coordinator needs to notice that a task is gone."""
    regroup: float = 3.0  # likewise, of workers that hold the model together
    give_up: float = 1.0  # how long servers may take after the last worker of a job that failed
    stop: float = 60.0  # how long workers may take to save and end after a request to stop
    save: float = 30.0  # likewise, before the whole job is started again
    end: float = 15.0  # how long servers may take to end after the last worker
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
    restarts: int = 0  # by itself, or with the other workers
    given_up: ExitReason | None = None  # why it is killed although its process lives
    due: float | None = None  # when it is killed for that; after SIGKILL: when it counts as ended

    def start(self) -> None:
        self.alive, self.terminated, self.killed, self.finished = True, False, False, False
        self.given_up = self.due = None

    def restart(self) -> Start:
        self.restarts += 1
        self.start()
        return Start(self.name)

    def terminate(self) -> Terminate:
        self.terminated = True
        return Terminate(self.name)

    def kill(self, due: float | None = None) -> Kill:
        """Kills the task. After `due` it counts as ended even if its process lives."""
        self.killed, self.due = True, due
        return Kill(self.name)

    def ended_by_us(self, status: int, reason: ExitReason) -> bool:
        """Returns whether the task, which has ended, did what it was asked to."""
        if self.terminated and not self.worker:
            return True  # whatever it says of the job's end
        asked = status in (-signal.SIGTERM, -signal.SIGINT) and self.terminated
        killed = status == -signal.SIGKILL and self.killed
        return (asked or killed) and reason.kind in ("signal", "gone")

    @property
    def worker(self) -> bool:
        return self.name.startswith("worker:")
