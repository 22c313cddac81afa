"""What to do when a task of a local job ends. Pure: events in, instructions out.

A worker that finishes leaves the job; one that a signal kills is started again if that was asked
for, and otherwise left out; one that fails by itself, a dead server or a dead coordinator ends
the job, a dead aggregator does not. Nothing here starts, kills, reads or waits: `local.py` does,
and tests move the time.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from trireme.launch.outcome import Outcome

__all__ = [
    "Failure",
    "Instruction",
    "Kill",
    "Limits",
    "Phase",
    "Restart",
    "Say",
    "Supervision",
    "Terminate",
]

INTERRUPTED = 130


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
class Say:
    """Tell the user."""

    text: str


Instruction = Terminate | Kill | Restart | Say


@dataclass(frozen=True, slots=True)
class Limits:
    """How long things may take, in seconds, and how often they may be tried.

    Attributes:
        restarts: how often each worker may be started again.
        settle: after a failure, how long the other tasks may take to end by themselves; longer
            than the coordinator needs to notice that a task is gone.
        give_up: after the last worker of a job that failed, how long servers and coordinator may
            take to end by themselves: they have nothing to lose.
        stop: after a request to stop, how long the workers may take to save and end.
        end: after the last worker, how long servers and coordinator may take to end.
        kill: between SIGTERM and SIGKILL where nothing has to be saved, and again until a task
            that does not even die is given up.
        echo: two requests to stop so close to each other are one: `timeout` and some process
            managers signal a process and then its whole group.
        together: the workers hold the model together: without one of them none can go on, and
            all are started again.
        regroup: where they do, and one has failed: how long the others may take to notice.
    """

    restarts: int = 0
    settle: float = 5.0
    give_up: float = 1.0
    stop: float = 60.0
    end: float = 15.0
    kill: float = 10.0
    echo: float = 0.2
    together: bool = False
    regroup: float = 3.0


class Phase(enum.Enum):
    """What the launcher is about."""

    RUNNING = "running"
    STOPPING = "stopping"
    FAILING = "failing"
    ENDING = "ending"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Failure:
    """One task that ended badly, in its own words or in its exit status's."""

    name: str
    outcome: Outcome


@dataclass(slots=True)
class _Task:
    name: str
    alive: bool = True
    told: bool = False  # SIGTERM was sent
    killed: bool = False  # SIGKILL was sent
    restarts: int = 0

    @property
    def worker(self) -> bool:
        return self.name.startswith("worker:")

    @property
    def aggregator(self) -> bool:
        return self.name.startswith("aggregator:")


class Supervision:
    """The tasks of one job, from the first start to the last end.

    Attributes:
        phase: what is going on.
        deadline: when `tick` has something to do; None for never.
        failures: the tasks that failed by themselves or suffered from it, in the order seen.
        lost: the workers that were killed while the others went on.
        unsaved: the workers that were killed before they could save, after a request to stop.
    """

    def __init__(self, limits: Limits) -> None:
        self.phase = Phase.RUNNING
        self.deadline: float | None = None
        self.failures: list[Failure] = []
        self.lost: list[Failure] = []
        self.unsaved: list[str] = []
        self._limits = limits
        self._tasks: dict[str, _Task] = {}
        self._failed = False
        self._asked: float | None = None  # when somebody first asked this launcher to stop
        self._interrupted = False  # the job was stopped before its end
        self._again: list[str] = []  # workers to start again when all of them have ended
        self._fallen: list[Failure] = []  # why
        self._ended_well = 0  # how many workers ended by themselves, finished or interrupted

    # Events ----------------------------------------------------------------------------------

    def started(self, name: str) -> None:
        """A task was started for the first time."""
        self._tasks[name] = _Task(name)

    def exited(self, now: float, name: str, status: int, outcome: Outcome) -> list[Instruction]:
        """A task has ended.

        Args:
            now: the time.
            name: the task.
            status: its exit status, or minus the number of the signal that killed it.
            outcome: why, if the status is neither 0 nor 130.
        """
        task = self._tasks[name]
        ours = (task.told or task.killed) and outcome.kind == "signal"
        task.alive = False
        if task.worker and self._again:
            if status not in (0, INTERRUPTED) and not ours:
                self._fallen.append(Failure(name, outcome))
            return self._regroup()
        if status in (0, INTERRUPTED):
            self._ended_well += task.worker
            self._interrupted |= status == INTERRUPTED
            said: list[Instruction] = []
        elif ours:
            said = []
        elif task.aggregator:
            said = self._aggregator_failed(Failure(name, outcome))
        elif task.worker:
            said = self._worker_failed(now, task, Failure(name, outcome))
        else:
            said = self._keeper_failed(now, Failure(name, outcome))
        return said + self._advance(now)

    def interrupt(self, now: float) -> list[Instruction]:
        """The user wants the job to stop: once to save and end, twice to end at once."""
        if self._asked is not None:
            if now < self._asked + self._limits.echo:
                return []
            self.unsaved = [task.name for task in self._alive() if task.worker]
            return [Say("asked twice: ending at once"), *self._kill(now)]
        self._asked = now
        if self.phase is not Phase.RUNNING:
            return [Say("the job is ending already; ask once more to end it at once")]
        self._interrupted = True
        self.phase = Phase.STOPPING
        self.deadline = now + self._limits.stop
        say = Say(
            f"stopping: the workers have {self._limits.stop:.0f} s to save and end; "
            "ask once more to end at once"
        )
        workers = [task for task in self._alive() if task.worker]
        return [say, *self._terminate(workers), *self._advance(now)]

    def tick(self, now: float) -> list[Instruction]:
        """Time has passed."""
        alive = self._alive()
        if self.deadline is None or now < self.deadline or not alive:
            return []
        names = ", ".join(task.name for task in alive)
        if self._again:
            self.deadline = None
            return self._kill_workers()
        if all(task.killed for task in alive):
            self.phase = Phase.DONE
            return [Say(f"{names} cannot be killed: left to the kernel")]
        if self.phase is Phase.STOPPING:
            self.unsaved = [task.name for task in alive if task.worker]
            late = ", ".join(self.unsaved)
            say = Say(f"{late} did not save and end within {self._limits.stop:.0f} s: killed")
            return [say, *self._kill(now)]
        # Servers and coordinator come last: the workers may need them to end well.
        due = [task for task in alive if task.worker or self.phase is Phase.ENDING]
        if all(task.told for task in due) or (self._limits.together and self._failed):
            return self._kill(now)
        self.deadline = now + self._limits.kill
        waited = self.phase is Phase.ENDING and self._ended_well and not self._failed
        warning = [Say(f"{names} did not end with the job: terminated")] if waited else []
        return [*warning, *self._terminate(task for task in due if not task.told)]

    # Conclusions -----------------------------------------------------------------------------

    @property
    def failed(self) -> bool:
        """Whether the job as a whole failed."""
        return self._failed

    @property
    def interrupted(self) -> bool:
        """Whether the job was stopped before its end."""
        return self._interrupted

    @property
    def culprit(self) -> Failure | None:
        """Why the job failed: the task that did so first, and by itself if there is one."""
        victims = [failure for failure in self.failures if failure.outcome.kind == "victim"]
        own = [failure for failure in self.failures if failure.outcome.kind != "victim"]
        for candidates in (own, self.lost, victims):
            if candidates:
                return min(candidates, key=lambda failure: failure.outcome.at)
        return None

    @property
    def status(self) -> int:
        """The exit status of the job: 0 finished, 1 failed, 2 bad usage, 130 saved and ended."""
        culprit = self.culprit
        if self._failed:
            return 2 if culprit is not None and culprit.outcome.kind == "usage" else 1
        if self.unsaved:
            return 1
        return INTERRUPTED if self._interrupted else 0

    @property
    def names(self) -> tuple[str, ...]:
        """Every task that was started."""
        return tuple(self._tasks)

    # What follows from an end ----------------------------------------------------------------

    def _worker_failed(self, now: float, task: _Task, failure: Failure) -> list[Instruction]:
        if self._limits.together:
            return self._one_of_all_failed(now, task, failure)
        kind = failure.outcome.kind
        may_restart = task.restarts < self._limits.restarts and failure.outcome.worth_a_restart
        if self.phase is Phase.RUNNING and may_restart:
            return self._restart(task, failure)
        if kind == "signal" and self.phase in (Phase.RUNNING, Phase.STOPPING):
            return self._lose(now, failure)
        if kind == "victim" and task.restarts and self._ended_well:
            return [Say(f"{task.name} was started again too late: the others had finished")]
        self._fail(now, failure)
        return []

    def _one_of_all_failed(self, now: float, task: _Task, failure: Failure) -> list[Instruction]:
        worth = failure.outcome.kind != "usage"
        if self.phase is not Phase.RUNNING or task.restarts >= self._limits.restarts or not worth:
            self._fail(now, failure)
            return []
        self._again = [other.name for other in self._tasks.values() if other.worker]
        self._fallen = [failure]
        self.deadline = now + self._limits.regroup
        return self._regroup()

    def _regroup(self) -> list[Instruction]:
        """Starts all workers again when the last of them has ended."""
        workers = [self._tasks[name] for name in self._again]
        if any(worker.alive for worker in workers):
            return []
        self._again = []
        self.deadline = None
        own = [failure for failure in self._fallen if failure.outcome.kind != "victim"]
        first = min(own or self._fallen, key=lambda failure: failure.outcome.at)
        orders: list[Instruction] = [
            Say(
                f"{first.name} {_how(first)}; all workers are started again, from the newest "
                f"checkpoint ({workers[0].restarts + 1} of {self._limits.restarts})"
            )
        ]
        for worker in workers:
            worker.restarts += 1
            worker.alive, worker.told, worker.killed = True, False, False
            orders.append(Restart(worker.name, self._limits.restarts - worker.restarts))
        return orders

    def _restart(self, task: _Task, failure: Failure) -> list[Instruction]:
        task.restarts += 1
        task.alive = True
        left = self._limits.restarts - task.restarts
        say = Say(
            f"{task.name} failed: {failure.outcome.summary}; started again "
            f"({task.restarts} of {self._limits.restarts})"
        )
        return [say, Restart(task.name, left)]

    def _lose(self, now: float, failure: Failure) -> list[Instruction]:
        self.lost.append(failure)
        left = sum(task.worker for task in self._alive())
        if not left and not self._ended_well:
            self._begin_failing(now)
            return []
        rest = f"goes on with the {left} left" if left else "had finished without it"
        return [Say(f"WARNING: {failure.name} was {failure.outcome.summary}; the job {rest}")]

    def _aggregator_failed(self, failure: Failure) -> list[Instruction]:
        """Nothing is lost with it: its workers push by themselves."""
        if self.phase is Phase.ENDING:
            return []
        kind, summary = failure.outcome.kind, failure.outcome.summary
        what = f"was {summary}" if kind == "signal" else f"failed: {summary}"
        return [Say(f"WARNING: {failure.name} {what}; the workers push by themselves")]

    def _keeper_failed(self, now: float, failure: Failure) -> list[Instruction]:
        if self.phase is Phase.ENDING:
            if self._failed:
                return []
            return [Say(f"WARNING: {failure.name}, after the end: {failure.outcome.summary}")]
        self._fail(now, failure)
        return []

    def _fail(self, now: float, failure: Failure) -> None:
        self.failures.append(failure)
        self._begin_failing(now)

    def _begin_failing(self, now: float) -> None:
        self._failed = True
        if self.phase is Phase.RUNNING:
            together = self._limits.together
            self.deadline = now + (self._limits.regroup if together else self._limits.settle)
        self.phase = Phase.FAILING

    def _advance(self, now: float) -> list[Instruction]:
        """Goes on to the next phase when the last worker, or the last task, has ended."""
        alive = self._alive()
        if not alive:
            self._failed |= not (self._ended_well or self._interrupted)
            self.phase = Phase.DONE
            self.deadline = None
            return []
        if self.phase is Phase.ENDING or any(task.worker for task in alive):
            return []
        self.phase = Phase.ENDING
        if any(task.killed for task in alive):
            return []
        by_themselves = self._limits.give_up if self._failed else self._limits.end
        self.deadline = now + (by_themselves if self._expect_end() else 0.0)
        # Nobody tells the aggregator of the end, and it has nothing to bring to one.
        orders = self._terminate(task for task in alive if task.aggregator and not task.told)
        return [*orders, *self.tick(now)]

    def _expect_end(self) -> bool:
        """Whether the coordinator can know that the job is over."""
        nobody_told = not any(task.told for task in self._tasks.values() if task.worker)
        return self._ended_well > 0 or (self._failed and nobody_told)

    # Instructions ----------------------------------------------------------------------------

    def _alive(self) -> list[_Task]:
        return [task for task in self._tasks.values() if task.alive]

    def _terminate(self, tasks: Iterable[_Task]) -> list[Instruction]:
        orders: list[Instruction] = []
        for task in tasks:
            task.told = True
            orders.append(Terminate(task.name))
        return orders

    def _kill_workers(self) -> list[Instruction]:
        orders: list[Instruction] = []
        for task in self._alive():
            if task.worker:
                task.killed = True
                orders.append(Kill(task.name))
        return orders

    def _kill(self, now: float) -> list[Instruction]:
        self.deadline = now + self._limits.kill
        orders: list[Instruction] = []
        for task in self._alive():
            task.killed = True
            orders.append(Kill(task.name))
        return orders


def _how(failure: Failure) -> str:
    verb = "was" if failure.outcome.kind == "signal" else "failed:"
    return f"{verb} {failure.outcome.summary}"
