"""What a supervision tells a launcher to do, and how long it lets things take."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Instruction", "Kill", "Limits", "Restart", "RestartAll", "Say", "Terminate"]


@dataclass(frozen=True, slots=True)
class Terminate:
    """Ask a task to end: SIGTERM."""

    name: str


@dataclass(frozen=True, slots=True)
class Kill:
    """End a task and its children at once: SIGKILL."""

    name: str


@dataclass(frozen=True, slots=True)
class Restart:
    """Start a worker again, which may be started `left` more times after that."""

    name: str
    left: int


@dataclass(frozen=True, slots=True)
class RestartAll:
    """Start the whole job again, all of whose tasks have ended."""


@dataclass(frozen=True, slots=True)
class Say:
    """Tell the user."""

    text: str


Instruction = Terminate | Kill | Restart | RestartAll | Say


@dataclass(frozen=True, slots=True)
class Limits:
    """How long things may take, in seconds, and how often they may be tried.

    Attributes:
        restarts: how often each worker may be started again, and the whole job when a server or
            the coordinator died.
        settle: after a failure, how long the other tasks may take to end by themselves; longer
            than the coordinator needs to notice that a task is gone.
        give_up: after the last worker of a job that failed, how long servers and coordinator may
            take to end by themselves: they have nothing to lose.
        stop: after a request to stop, how long the workers may take to save and end.
        end: after the last worker, how long servers and coordinator may take to end.
        idle: after the job's end, how long a worker that lives on may do nothing: use less than a
            hundredth of a core, and print nothing.
        kill: between SIGTERM and SIGKILL where nothing has to be saved, and again until a task
            that does not even die is given up.
        echo: two requests to stop so close to each other are one: `timeout` and some process
            managers signal a process and then its whole group.
        together: the workers hold the model together: without one of them none can go on, and
            all are started again.
        regroup: where they do, and one has failed: how long the others may take to notice.
        rescue: before the whole job is started again: how long the others may take to save what
            they hold and end.
        silence: after how long without a word the coordinator is given up.
    """

    restarts: int = 0
    settle: float = 5.0
    give_up: float = 1.0
    stop: float = 60.0
    end: float = 15.0
    idle: float = 60.0
    kill: float = 10.0
    echo: float = 0.2
    together: bool = False
    regroup: float = 3.0
    rescue: float = 30.0
    silence: float = 20.0
