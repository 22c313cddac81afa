"""What to do when a task of a job ends, or hangs. Pure: events in, instructions out.

A worker that finishes leaves the job; one that a signal kills is started again if that was asked
for, and otherwise left out; one that fails by itself ends the job, a dead aggregator does not.
When a server or the coordinator dies, the whole job is started again if that was asked for, and
otherwise ends. A task that the coordinator has given up is killed, and then it is like any other
that was killed. Nothing here starts, kills, reads or waits: `launcher.py` does, and tests move the
time.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trireme.launch.orders import (
    Instruction,
    Kill,
    Limits,
    Restart,
    RestartAll,
    Say,
    Terminate,
)
from trireme.launch.outcome import Outcome

__all__ = [
    "Failure",
    "Instruction",
    "Kill",
    "Limits",
    "Phase",
    "Restart",
    "RestartAll",
    "Say",
    "Supervision",
    "Terminate",
]

INTERRUPTED = 130
BUSY = 0.01
"""The share of a core that a process uses at least if it does anything."""


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
    given_up: Outcome | None = None  # why it is to be killed, or was
    due: float | None = None  # when to kill it for that, and after it, when to forget it
    used: float = 0.0  # what it had done at the time `busy`
    busy: float | None = None  # after the job's end: when it was last seen to do anything

    def again(self) -> None:
        """It is started again."""
        self.alive, self.told, self.killed = True, False, False
        self.given_up = self.due = self.busy = None

    @property
    def worker(self) -> bool:
        return self.name.startswith("worker:")

    @property
    def aggregator(self) -> bool:
        return self.name.startswith("aggregator:")

    @property
    def coordinator(self) -> bool:
        return self.name.startswith("coordinator:")


class Supervision:
    """The tasks of one job, from the first start to the last end.

    Attributes:
        phase: what is going on.
        failures: the tasks that failed by themselves or suffered from it, in the order seen.
        lost: the workers that were killed while the others went on.
        unsaved: the workers that were killed before they could save, after a request to stop.
    """

    def __init__(self, limits: Limits) -> None:
        self.phase = Phase.RUNNING
        self.failures: list[Failure] = []
        self.lost: list[Failure] = []
        self.unsaved: list[str] = []
        self._limits = limits
        self._tasks: dict[str, _Task] = {}
        self._deadline: float | None = None  # of the phase, or of what is to be started again
        self._failed = False
        self._asked: float | None = None  # when somebody first asked this launcher to stop
        self._interrupted = False  # the job was stopped before its end
        self._cut_short = False  # a task says so itself
        self._again: list[str] = []  # tasks to start again when all of them have ended
        self._fallen: list[Failure] = []  # why
        self._rounds = 0  # how often the whole job was started again
        self._awaited = False  # the launcher is to start the whole job again, and has not begun
        self._ended_well = 0  # how many workers ended by themselves, finished or interrupted
        self._last: Failure | None = None  # the last worker, where that was lost
        self._over = False  # the job has reached its end: its coordinator ended by itself
        self._joined: bool | None = None  # whether a worker ever took part, if that is known
        self._formed = False  # all have taken part
        self._missing: tuple[float, Failure] | None = None  # until when, who has ended before that

    # Events ----------------------------------------------------------------------------------

    def started(self, name: str) -> None:
        """A task was started, for the first time or with the whole job."""
        self._awaited = False
        self._tasks.setdefault(name, _Task(name)).again()

    def exited(self, now: float, name: str, status: int, outcome: Outcome) -> list[Instruction]:
        """A task has ended.

        Args:
            now: the time.
            name: the task.
            status: its exit status, or minus the number of the signal that killed it.
            outcome: why, if the status is neither 0 nor 130.
        """
        task = self._tasks[name]
        if not task.alive:
            return []  # it was given up for good, and the kernel has ended it after all
        if task.given_up is not None and outcome.kind == "signal":
            outcome = task.given_up
        ended_us = (-signal.SIGTERM,) * task.told + (-signal.SIGKILL,) * task.killed
        ours = status in ended_us and outcome.kind == "signal"
        task.alive, task.due = False, None
        if name in self._again:
            if status not in (0, INTERRUPTED) and not ours:
                self._fallen.append(Failure(name, outcome))
            # With the coordinator dies who would tell the workers of the death of a server.
            silent = task.coordinator and status not in (0, INTERRUPTED)
            workers = [other for other in self._alive() if other.worker and not other.told]
            told = self._terminate(workers) if silent and not ours else []
            return [*told, *self._regroup(now)]
        if status in (0, INTERRUPTED):
            self._ended_well += task.worker
            self._cut_short |= status == INTERRUPTED
            self._interrupted |= status == INTERRUPTED
            self._note_missing(now, task, Failure(name, _came_to_nothing()))
            self._over |= task.coordinator and not task.told
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

    def attended(
        self, now: float, joined: bool, lost: Mapping[str, Outcome], *, formed: bool = True
    ) -> list[Instruction]:
        """The coordinator says who takes part.

        Args:
            now: the time.
            joined: whether any worker ever did.
            lost: the tasks that it has given up although their processes live, and why. A worker
                may come back by itself for a moment more.
            formed: whether all tasks once took part, and the job began.
        """
        self._joined = joined
        if formed:
            self._formed, self._missing = True, None
        for task in self._alive():
            outcome = lost.get(task.name)
            if outcome is None:
                if not task.killed:
                    task.given_up = task.due = None
            elif task.given_up is None and not task.killed:
                task.given_up = outcome
                task.due = now + (self._limits.settle if task.worker else 0.0)
        return self._kill_the_given_up(now)

    def silent(self, now: float, name: str, outcome: Outcome) -> list[Instruction]:
        """A task does nothing any more, and is to be killed at once."""
        task = self._tasks[name]
        if not task.alive or task.killed:
            return []
        task.given_up, task.due = outcome, now
        return self._kill_the_given_up(now)

    @property
    def outliving(self) -> tuple[str, ...]:
        """The workers that live after the job's end: `worked` is to be told what they do."""
        has_coordinator = any(task.coordinator for task in self._tasks.values())
        over = self._over if has_coordinator else self._ended_well > 0
        if not over or self.phase is not Phase.RUNNING or self._again:
            return ()
        return tuple(task.name for task in self._alive() if task.worker)

    def worked(self, now: float, name: str, used: float) -> list[Instruction]:
        """A worker that outlives the job has done so much: seconds of a core, and lines printed."""
        task = self._tasks[name]
        if task.busy is None or used - task.used >= BUSY * self._limits.idle:
            task.busy, task.used = now, used
        if now - task.busy < self._limits.idle or task.killed:
            return []
        task.killed, task.due = True, now + self._limits.kill
        seconds = f"{self._limits.idle:.0f} s"
        return [
            Say(f"WARNING: {name} did nothing for {seconds} after the end of the job: killed"),
            Kill(name),
        ]

    def interrupt(self, now: float) -> list[Instruction]:
        """The user wants the job to stop: once to save and end, twice to end at once."""
        if self._asked is not None:
            if now < self._asked + self._limits.echo:
                return []
            self.unsaved = [task.name for task in self._alive() if task.worker]
            return [Say("asked twice: ending at once"), *self._kill(now)]
        self._asked = now
        if self._again:
            return self._stay_down(now)
        if self.phase is not Phase.RUNNING:
            return [Say("the job is ending already; ask once more to end it at once")]
        self._interrupted = True
        self.phase = Phase.STOPPING
        self._deadline = now + self._limits.stop
        say = Say(
            f"stopping: the workers have {self._limits.stop:.0f} s to save and end; "
            "ask once more to end at once"
        )
        workers = [task for task in self._alive() if task.worker]
        return [say, *self._terminate(workers), *self._advance(now)]

    @property
    def deadline(self) -> float | None:
        """When `tick` has something to do; None for never."""
        times = [task.due for task in self._alive() if task.due is not None]
        if self._missing is not None and self.phase is Phase.RUNNING:
            times.append(self._missing[0])
        if self._deadline is not None:
            times.append(self._deadline)
        return min(times, default=None)

    def tick(self, now: float) -> list[Instruction]:
        """Time has passed."""
        orders = self._kill_the_given_up(now)
        alive = self._alive()
        if self._missing is not None and self.phase is Phase.RUNNING and now >= self._missing[0]:
            return [*orders, *self._cannot_begin(now, self._missing[1])]
        if self._deadline is None or now < self._deadline or not alive:
            return orders
        return [*orders, *self._too_late(now, alive)]

    def _too_late(self, now: float, alive: list[_Task]) -> list[Instruction]:
        """The phase has taken too long."""
        names = ", ".join(task.name for task in alive)
        if self._again:
            return self._hurry(now)
        if all(task.killed for task in alive):
            self.phase = Phase.DONE
            return [Say(f"{names} cannot be killed: left to the kernel")]
        if self.phase is Phase.STOPPING:
            late = [task.name for task in alive if task.worker]
            did = "end" if self._over else "save and end"  # all that takes part has, by now
            self.unsaved = [] if self._over else late
            seconds = f"{self._limits.stop:.0f} s"
            say = Say(f"{', '.join(late)} did not {did} within {seconds}: killed")
            return [say, *self._kill(now)]
        # Servers and coordinator come last: the workers may need them to end well.
        due = [task for task in alive if task.worker or self.phase is Phase.ENDING]
        if all(task.told for task in due) or (self._limits.together and self._failed):
            return self._kill(now)
        self._deadline = now + self._limits.kill
        if self._last is not None and any(task.coordinator for task in due):
            self._fail(now, self._last)  # the coordinator waits for it: something was left to do
            self.phase = Phase.ENDING
        waited = self.phase is Phase.ENDING and self._ended_well and not self._failed
        warning = [Say(f"{names} did not end with the job: terminated")] if waited else []
        return [*warning, *self._terminate(task for task in due if not task.told)]

    def _kill_the_given_up(self, now: float) -> list[Instruction]:
        """Kills what is due; what was killed long ago counts as ended, whatever the kernel says."""
        orders: list[Instruction] = []
        for task in self._alive():
            if task.due is None or now < task.due:
                continue
            if not task.killed:
                task.killed, task.due = True, now + self._limits.kill
                orders.append(Kill(task.name))
            else:
                orders.append(Say(f"{task.name} cannot be killed: left to the kernel"))
                outcome = task.given_up or _unkillable()
                orders += self.exited(now, task.name, -9, outcome)
        return orders

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
        may_restart = task.restarts < self._limits.restarts and failure.outcome.worth_a_restart
        if self.phase is Phase.RUNNING and may_restart and not self._over:
            return self._restart(task, failure)
        if failure.outcome.sudden and self.phase in (Phase.RUNNING, Phase.STOPPING):
            self._note_missing(now, task, failure)
            return self._lose(now, failure)
        if failure.outcome.kind == "victim":
            if task.given_up is not None and self.phase is Phase.RUNNING:
                return self._lose(now, failure)
            if self._over or (task.restarts and self._ended_well):
                return [Say(f"{task.name} came too late: the others had finished")]
        self._fail(now, failure)
        return []

    def _one_of_all_failed(self, now: float, task: _Task, failure: Failure) -> list[Instruction]:
        worth = failure.outcome.kind != "usage"
        if self.phase is not Phase.RUNNING or task.restarts >= self._limits.restarts or not worth:
            self._fail(now, failure)
            return []
        self._again = [other.name for other in self._tasks.values() if other.worker]
        self._fallen = [failure]
        self._deadline = now + self._limits.regroup
        return self._regroup(now)

    def _regroup(self, now: float) -> list[Instruction]:
        """Starts again what is to be, when the last of it has ended."""
        tasks = [self._tasks[name] for name in self._again]
        alive = [task for task in tasks if task.alive]
        if not any(task.worker for task in alive):
            # Servers have nothing to lose without workers.
            limit = now + self._limits.give_up
            self._deadline = limit if self._deadline is None else min(self._deadline, limit)
        if alive:
            return []
        whole = len(tasks) == len(self._tasks)
        self._again, self._deadline, self._ended_well = [], None, 0
        if whole and any(not task.worker for task in tasks):
            self._rounds += 1
            self._awaited, self._joined = True, None
            self._formed, self._missing = False, None
            lost = {f.outcome.loss: f.name for f in self._fallen if f.outcome.loss}
            return [*(Say(f"{name}: {loss}") for loss, name in lost.items()), RestartAll()]
        own = [failure for failure in self._fallen if failure.outcome.kind != "victim"]
        first = min(own or self._fallen, key=lambda failure: failure.outcome.at)
        orders: list[Instruction] = [
            Say(
                f"{first.name} {_how(first)}; all workers are started again, from the newest "
                f"checkpoint ({tasks[0].restarts + 1} of {self._limits.restarts})"
            )
        ]
        for worker in tasks:
            worker.restarts += 1
            worker.again()
            orders.append(Restart(worker.name, self.restarts_left(worker.name)))
        return orders

    def _hurry(self, now: float) -> list[Instruction]:
        """What is to be started again has not ended in time."""
        left = [task for task in self._alive() if task.name in self._again]
        late = [task for task in left if not task.killed]
        if late:
            self._deadline = now + self._limits.kill
            for task in late:
                task.killed, task.due = True, None
            workers = ", ".join(task.name for task in late if task.worker)
            said = [Say(f"{workers} did not end for the restart: killed")] if workers else []
            return [*said, *(Kill(task.name) for task in late)]
        names = ", ".join(task.name for task in left)
        stuck = Say(f"{names} cannot be killed: left to the kernel, and nothing is started again")
        return [stuck, *self._stay_down(now)]

    def _stay_down(self, now: float) -> list[Instruction]:
        """Starts nothing again after all: the job has failed."""
        self.failures += self._fallen
        self._again = []
        self.phase = Phase.RUNNING
        self._begin_failing(now)
        # The workers may be saving what they hold: they are asked to end when that takes too long.
        said = Say("the job was about to start again, and ends instead")
        return [said, *self._advance(now)]

    def _may_begin_again(self, failure: Failure) -> bool:
        """Whether the whole job is to be started again because of a dead server or coordinator."""
        only_victims = all(other.outcome.kind == "victim" for other in self.failures)
        going_on = self.phase is Phase.RUNNING or (self._failed and only_victims)
        allowed = self._rounds < self._limits.restarts and failure.outcome.worth_a_restart
        return going_on and allowed and self._asked is None

    def _begin_again(self, now: float, failure: Failure) -> list[Instruction]:
        """Ends all tasks, each of which may save first, to start the whole job again."""
        self.phase = Phase.RUNNING
        self._failed = False
        self.failures.clear()
        self._fallen = [failure]
        self._again = list(self._tasks)
        self._deadline = now + self._limits.rescue
        orders: list[Instruction] = [
            Say(
                f"WARNING: {failure.name} {_how(failure)}; the whole job is started again, from "
                f"its newest checkpoint ({self._rounds + 1} of {self._limits.restarts})"
            )
        ]
        # Of the death of a server the coordinator tells the others; of its own nobody does.
        dead_coordinator = self._tasks[failure.name].coordinator
        aggregators = [task for task in self._alive() if task.aggregator]
        workers = [task for task in self._alive() if task.worker and dead_coordinator]
        return [*orders, *self._terminate([*workers, *aggregators]), *self._regroup(now)]

    def restarts_left(self, name: str) -> int:
        """How often a task may be started again from now on."""
        task = self._tasks[name]
        return self._limits.restarts - (task.restarts if task.worker else self._rounds)

    def _restart(self, task: _Task, failure: Failure) -> list[Instruction]:
        task.restarts += 1
        task.again()
        say = Say(
            f"{task.name} failed: {failure.outcome.summary}; started again "
            f"({task.restarts} of {self._limits.restarts})"
        )
        return [say, Restart(task.name, self.restarts_left(task.name))]

    def _note_missing(self, now: float, task: _Task, failure: Failure) -> None:
        """A worker has ended for good. If the job has not begun by then, it never will."""
        has_coordinator = any(other.coordinator for other in self._tasks.values())
        if task.worker and has_coordinator and not self._formed and self._missing is None:
            self._missing = (now + self._limits.settle, failure)

    def _cannot_begin(self, now: float, failure: Failure) -> list[Instruction]:
        """All tasks must come before the job begins, and one of them cannot come any more."""
        self._missing = None
        if self._joined is None or not any(task.worker for task in self._alive()):
            return []  # nothing is known of it, or nobody waits for it: see `_conclude`
        self._fail(now, failure)
        how = f"{failure.name} ended before the job had begun, which needs all tasks"
        return [Say(f"WARNING: {how}: the job ends"), *self._terminate(self._alive())]

    def _lose(self, now: float, failure: Failure) -> list[Instruction]:
        self.lost.append(failure)
        left = sum(task.worker for task in self._alive())
        if not left and not self._achieved:
            if self.phase is Phase.STOPPING:  # nothing is saved: `_conclude` says so
                return [Say(f"WARNING: {failure.name} {_how(failure)}, and no worker is left")]
            self._begin_failing(now)
            return []
        self._last = None if left else failure
        rest = f"; the job goes on with the {left} left" if left else "; the others had finished"
        if left and self._missing is not None and self._joined is not None:
            rest = ""  # whether it does is not known yet
        return [Say(f"WARNING: {failure.name} {_how(failure)}{rest}")]

    def _aggregator_failed(self, failure: Failure) -> list[Instruction]:
        """Nothing is lost with it: its workers push by themselves."""
        if self.phase is Phase.ENDING:
            return []
        how = _how(failure)
        return [Say(f"WARNING: {failure.name} {how}; the workers push by themselves")]

    def _keeper_failed(self, now: float, failure: Failure) -> list[Instruction]:
        if self._may_begin_again(failure):
            return self._begin_again(now, failure)
        # What the coordinator says of the job is so, also when its workers ended as if well.
        if self.phase is Phase.ENDING and failure.outcome.kind != "victim":
            if self._failed:
                return []
            return [Say(f"WARNING: {failure.name}, after the end: {failure.outcome.summary}")]
        if self.phase is Phase.ENDING and self._failed:
            return []
        self._fail(now, failure)
        return []

    def _fail(self, now: float, failure: Failure) -> None:
        self.failures.append(failure)
        self._begin_failing(now)

    def _begin_failing(self, now: float) -> None:
        self._failed = True
        if self.phase is Phase.RUNNING:
            together = self._limits.together
            self._deadline = now + (self._limits.regroup if together else self._limits.settle)
        self.phase = Phase.FAILING

    def _advance(self, now: float) -> list[Instruction]:
        """Goes on to the next phase when the last worker, or the last task, has ended."""
        alive = self._alive()
        if self._again or (self._awaited and self.phase is Phase.RUNNING):
            return []
        if not alive:
            self._conclude()
            return []
        if self.phase is Phase.ENDING or any(task.worker for task in alive):
            return []
        self.phase = Phase.ENDING
        if any(task.killed for task in alive):
            return []
        hopeless = self._failed or self._joined is False
        by_themselves = self._limits.give_up if hopeless else self._limits.end
        self._deadline = now + (by_themselves if self._expect_end() else 0.0)
        # Nobody tells the aggregator of the end, and it has nothing to bring to one.
        orders = self._terminate(task for task in alive if task.aggregator and not task.told)
        return [*orders, *self.tick(now)]

    def _conclude(self) -> None:
        """The last task has ended."""
        if self._ended_well and not self._cut_short and not self.unsaved:
            self._interrupted = False  # the request came when there was nothing left to do
        self._failed |= not (self._achieved or self._interrupted)
        if self._interrupted and self._joined and not self._ended_well and not self.unsaved:
            self.unsaved = [task.name for task in self._tasks.values() if task.worker]
        if self._joined is False and not self._failed and not self._interrupted:
            first = next(task.name for task in self._tasks.values() if task.worker)
            self._failed = True
            self.failures.append(Failure(first, _nobody_joined()))
        self.phase = Phase.DONE
        self._deadline = None

    @property
    def _achieved(self) -> bool:
        """Whether a worker has ended well, perhaps one that was killed before its process ended."""
        had_workers = any(task.worker for task in self._tasks.values())
        return self._ended_well > 0 or (self._over and had_workers)

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

    def _kill(self, now: float) -> list[Instruction]:
        self._deadline = now + self._limits.kill
        orders: list[Instruction] = []
        for task in self._alive():
            task.killed, task.due = True, None  # from now on the phase's deadline counts
            orders.append(Kill(task.name))
        return orders


def _how(failure: Failure) -> str:
    verb = "was" if failure.outcome.sudden else "failed:"
    return f"{verb} {failure.outcome.summary}"


def _unkillable() -> Outcome:
    return Outcome(kind="hung", summary="killed, and has not ended", at=0.0)


def _came_to_nothing() -> Outcome:
    return Outcome(
        kind="usage",
        summary="its program ended before the job had begun: the others waited for it. Does it "
        "open a trireme.Session, or call trireme.distribute, on every worker?",
        at=0.0,
    )


def _nobody_joined() -> Outcome:
    return Outcome(
        kind="usage",
        summary="the program ended, and no worker had joined the job: nothing was trained. Does "
        "it open a trireme.Session, or call trireme.distribute?",
        at=0.0,
    )
