"""How long the supervision of a job lets things take, and how often tasks are started again."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SupervisionLimits"]


@dataclass(frozen=True, slots=True)
class SupervisionLimits:
    """Durations in seconds, and the number of restarts.

    Attributes:
        restarts: how often each worker may be started again, and how often the whole job may be
            when a server or the coordinator died.
        settle: how long the other tasks may take to end by themselves after a failure. It is
            longer than the coordinator needs to notice that a task is gone.
        give_up: how long servers and coordinator may take to end by themselves after the last
            worker of a job that failed. They have nothing to lose.
        stop: how long the workers may take to save and end after a request to stop.
        end: how long servers and coordinator may take to end after the last worker.
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
        rescue: how long the other tasks may take to save what they hold and end before the whole
            job is started again.
        silence: how long the coordinator may report nothing before it is given up.
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
