"""One task as the supervision of its job knows it, and what the launcher is asked to do with it."""

from __future__ import annotations

from dataclasses import dataclass

from trireme.launch.exit_reason import ExitReason

__all__ = ["Action", "Kill", "Notify", "Restart", "SupervisedTask", "Terminate"]


@dataclass(frozen=True, slots=True)
class Terminate:
    """Ask a task to end, with SIGTERM."""

    name: str


@dataclass(frozen=True, slots=True)
class Kill:
    """End a task and its children at once, with SIGKILL."""

    name: str


@dataclass(frozen=True, slots=True)
class Restart:
    """Start a worker again."""

    name: str


@dataclass(frozen=True, slots=True)
class Notify:
    """Show a line to the user."""

    text: str


Action = Terminate | Kill | Restart | Notify


@dataclass(slots=True)
class SupervisedTask:
    """A task that was started, and what the supervision has decided about it.

    Attributes:
        name: the task's name, such as `worker:1`.
        alive: whether its process runs.
        terminated: whether SIGTERM was sent to it.
        killed: whether SIGKILL was sent to it.
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
    restarts: int = 0
    given_up: ExitReason | None = None
    due: float | None = None
    used: float = 0.0
    active_at: float | None = None

    def start(self) -> None:
        """Marks the task as started, for the first time or again."""
        self.alive, self.terminated, self.killed = True, False, False
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
    def kill_reason(self) -> ExitReason:
        """Why the task was killed."""
        if self.given_up is not None:
            return self.given_up
        return ExitReason(kind="hung", summary="killed, and has not ended", at=0.0)

    @property
    def worker(self) -> bool:
        """Whether the task is a worker."""
        return self.name.startswith("worker:")

    @property
    def coordinator(self) -> bool:
        """Whether the task is the coordinator."""
        return self.name.startswith("coordinator:")
