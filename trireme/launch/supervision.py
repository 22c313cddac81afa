"""The decisions about a job's tasks: what to do when one ends, hangs, or takes too long.

Pure: events go in, actions come out. `launcher.py` starts, kills and waits; tests move the time.

A worker that finishes leaves the job. One that a signal kills, that leaves as SIGTERM has asked it
to, or that fails by itself, is started again where restarts are allowed; otherwise the job goes on
without it, or after a failure of its own ends. With `--replicas`, a server that fails is started
again where restarts are left; otherwise the job goes on with the others. When a server is lost that
the job does not outlive, the whole job is started again where restarts are allowed; otherwise it
ends. A task that the coordinator has given up is killed. One that is dismissed ends as it likes.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence

from trireme.launch.exit_reason import ENDED_TOO_EARLY, INTERRUPTED, LEFT, NEVER_LEFT, ExitReason
from trireme.launch.supervision_state import (
    Action,
    Notify,
    Phase,
    Start,
    StopJob,
    SupervisedTask,
    SupervisionLimits,
)
from trireme.launch.verdict import Failure, Verdict, losses
from trireme.printable import counted


class Supervision:
    """The tasks of one job, from the first start to the last end: events in, actions out."""

    def __init__(self, limits: SupervisionLimits) -> None:
        self.phase = Phase.STARTING
        self.verdict = Verdict()  # how the job will end, as far as that is known
        self._limits = limits
        self._tasks: dict[str, SupervisedTask] = {}
        self._phase_deadline: float | None = None
        self._restarting: list[SupervisedTask] = []  # who ends now, to be started again together
        self._causes: list[Failure] = []  # of that
        self._whole_restarts = 0
        self._first_request: float | None = None  # when the launcher was first asked to stop
        self._saved_early = False  # a task ended with the status of an interrupted one
        self._last_worker: Failure | None = None  # the last worker, where it was lost
        self._job_over = False  # every task knows of the end
        self._joined: bool | None = None  # a worker ever joined, once that is known
        self._formed: bool | None = None  # all tasks have joined, likewise

    @property
    def goes_on(self) -> bool:
        """Whether the workers train, save, or are being started again."""
        phases = (Phase.RUNNING, Phase.RESTARTING, Phase.STOPPING)
        return self.phase in phases and not self._job_over

    @property
    def deadline(self) -> float | None:
        """When `tick` next has something to do; None for never."""
        times = [self._phase_deadline, *(task.due for task in self._alive)]
        return min((time for time in times if time is not None), default=None)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tasks)

    def restarts_left(self, name: str) -> int:
        task = self._tasks[name]
        by_itself = task.worker or self._limits.outlives_servers
        return self._limits.restarts - task.restarts if by_itself else self.whole_restarts_left

    @property
    def whole_restarts_left(self) -> int:
        """How often the whole job may still be started again."""
        return self._limits.restarts - self._whole_restarts

    # Events ----------------------------------------------------------------------------------

    def started(self, name: str) -> None:
        """A task was started, for the first time or again."""
        if self.phase is Phase.STARTING:
            self.phase = Phase.RUNNING
        self._tasks.setdefault(name, SupervisedTask(name)).start()

    def exited(self, now: float, name: str, status: int, reason: ExitReason) -> list[Action]:
        """A task has ended; a signal's status is minus its number."""
        task = self._tasks[name]
        if not task.alive:
            return []  # it counted as ended already, and the kernel has ended it after all
        if task.given_up is not None and reason.kind == "signal":
            reason = task.given_up
        left = status in (0, INTERRUPTED) or (status == LEFT and task.terminated)
        failure = None if left or task.ended_by_us(status, reason) else Failure(name, reason)
        task.alive, task.due, task.status = False, None, status
        if self.phase is Phase.RESTARTING and task in self._restarting:
            task.finished = task.worker and left
            self._saved_early |= task.finished and status != 0
            self._causes += [failure] if failure is not None else []
            return self._proceed_with_restart(now)
        actions: list[Action] = []
        if task.dismissed:
            how = "has left" if failure is None else f"left, and {failure.reason.summary}"
            actions = [Notify(f"{name} {how}: the job was made smaller")]
        elif left:
            task.finished = task.worker
            # A server that the launcher ends says that the job is interrupted, whatever it was.
            early = status != 0 and (task.worker or not task.terminated)
            self._saved_early |= early
            self.verdict.interrupted |= early
            if task.worker and self._is_awaited:
                self._fail(now, Failure(name, ENDED_TOO_EARLY))
        elif failure is not None and task.worker:
            actions = self._worker_failed(now, task, failure)
        elif failure is not None:
            actions = self._server_failed(now, task, failure)
        return actions + self._advance(now)

    def membership_reported(
        self, now: float, joined: bool, lost: Mapping[str, ExitReason], *, formed: bool = True
    ) -> list[Action]:
        """Takes in the coordinator's view; `lost` has the tasks that it has given up, and why."""
        self._joined, self._formed = joined, self._formed or formed
        actions: list[Action] = []
        for task in self._alive:
            reason = lost.get(task.name)
            if reason is None:
                if not task.killed:
                    task.given_up = task.due = None
            elif task.given_up is None and not task.killed:
                task.given_up = reason
                comes_back = task.worker or self._limits.outlives_servers
                task.due = now + (self._limits.settle if comes_back else 0.0)
        for name in lost:
            actions += self._never_left(now, self._tasks[name]) if name in self._tasks else []
        return [*actions, *self._kill_the_given_up(now)]

    def _never_left(self, now: float, task: SupervisedTask) -> list[Action]:
        """A worker is lost whose process has ended well, as if its program had finished."""
        if task.alive or not task.finished or task.status != 0 or self._job_over:
            return []
        task.finished = False
        failure = Failure(task.name, NEVER_LEFT)
        if self.phase is not Phase.ENDING:
            return self._worker_failed(now, task, failure)
        self._fail(now, failure)
        return [Notify(f"WARNING: {failure}")]

    def resized(
        self, wanted: Iterable[str], dismissed: Iterable[str], *, asked: bool
    ) -> list[Action]:
        """Takes in which tasks the job is to have; once `asked` for, lost ones are started too."""
        for name in {*dismissed} & self._tasks.keys():
            self._tasks[name].dismissed = True
        if self.phase is not Phase.RUNNING:
            return []
        actions: list[Action] = []
        for name in wanted:
            task = self._tasks.get(name)
            if task is not None and task.alive:  # it stays after all, unless it is about to end
                task.dismissed &= task.given_up is not None
            elif task is None or task.dismissed or (asked and not task.finished):
                if task is not None:
                    task.dismissed, task.restarts = False, 0
                actions += [Notify(f"{name} is started: the job was made larger"), Start(name)]
        return actions

    def keep_only(self, names: Iterable[str]) -> None:
        """The whole job is about to start with these tasks; others are forgotten."""
        kept = {*names}
        self._tasks = {name: task for name, task in self._tasks.items() if name in kept}

    def job_over(self, now: float, outcome: str) -> list[Action]:
        """The job is over, and every task knows that."""
        if self._job_over or outcome == "failed":  # how its tasks end decides what follows
            return []
        self._job_over = True
        # A server that the launcher ends says that the job is interrupted, whatever it was.
        by_us = any(not task.worker and task.terminated for task in self._tasks.values())
        if outcome == "interrupted" and not by_us:
            self._saved_early = self.verdict.interrupted = True
        return self._advance(now)

    def interrupt(self, now: float) -> list[Action]:
        """The user asks the job to stop: once to save and end, twice to end at once."""
        workers = [task for task in self._workers if task.alive]
        if self._first_request is not None:
            if now < self._first_request + self._limits.echo:
                return []
            self.verdict.unsaved = [task.name for task in workers]
            return [Notify("asked twice: ending at once"), *self._kill(now, self._alive)]
        self._first_request = now
        if self.phase is Phase.RESTARTING:
            self.verdict.interrupted = True
            notice = Notify("the job was about to start again, and ends instead")
            return [notice, *self._proceed_with_restart(now)]
        if self.phase not in (Phase.STARTING, Phase.RUNNING):
            return [Notify("the job is ending already; ask once more to end it at once")]
        self.verdict.interrupted = True
        self.phase = Phase.STOPPING
        self._phase_deadline = now + self._limits.stop
        notice = Notify(
            f"stopping: the workers have {self._limits.stop:.0f} s to save and end; "
            "ask once more to end at once"
        )
        # The coordinator first: a signal to one worker alone would only have that one leave.
        stop = [StopJob()] if self._limits.coordinated and workers else []
        return [notice, *stop, *(worker.terminate() for worker in workers), *self._advance(now)]

    def tick(self, now: float) -> list[Action]:
        actions = self._kill_the_given_up(now)
        if self._phase_deadline is None or now < self._phase_deadline or not self._alive:
            return actions
        return [*actions, *self._too_late(now, self._alive)]

    # Deadlines -------------------------------------------------------------------------------

    def _too_late(self, now: float, alive: list[SupervisedTask]) -> list[Action]:
        if self.phase is Phase.RESTARTING:
            return self._restart_too_late(now)
        names = _names(alive)
        if all(task.killed for task in alive):
            self.phase = Phase.DONE
            return [Notify(f"{names} cannot be killed: left to the kernel")]
        if self.phase is Phase.STOPPING:
            late = [task.name for task in alive if task.worker]
            # After the job's end every worker has saved what it had to.
            missed = "end" if self._job_over else "save and end"
            self.verdict.unsaved = [] if self._job_over else late
            limit = f"within {self._limits.stop:.0f} s"
            notice = Notify(f"{', '.join(late)} did not {missed} {limit}: killed")
            return [notice, *self._kill(now, alive)]
        # Servers come last: the workers may need them to end well.
        due = [task for task in alive if task.worker or self.phase is Phase.ENDING]
        kill_all = self._limits.together and self.verdict.failed
        if kill_all or all(task.terminated for task in due):
            return self._kill(now, alive)
        self._phase_deadline = now + self._limits.kill
        if self._last_worker is not None and self._limits.coordinated and not self._job_over:
            # The coordinator waits for the lost worker: it had something left to do.
            self._fail(now, self._last_worker)
            self.phase = Phase.ENDING
        waited = self.phase is Phase.ENDING and self._left and not self.verdict.failed
        warning = [Notify(f"{names} did not end with the job: terminated")] if waited else []
        return [*warning, *(task.terminate() for task in due if not task.terminated)]

    def _kill_the_given_up(self, now: float) -> list[Action]:
        """Kills the tasks that are due. A task that was killed long ago counts as ended."""
        actions: list[Action] = []
        for task in self._alive:
            if task.due is None or now < task.due:
                continue
            if not task.killed:
                actions.append(task.kill(now + self._limits.kill))
            else:
                actions.append(Notify(f"{task.name} cannot be killed: left to the kernel"))
                hung = ExitReason(kind="hung", summary="killed, and has not ended", at=0.0)
                reason = task.given_up or hung
                actions += self.exited(now, task.name, -signal.SIGKILL, reason)
        return actions

    # Failures --------------------------------------------------------------------------------

    def _worker_failed(self, now: float, task: SupervisedTask, failure: Failure) -> list[Action]:
        together, kind = self._limits.together, failure.reason.kind
        worth = kind not in ("usage", "corrupted") if together else failure.reason.worth_a_restart
        may_restart = self.restarts_left(task.name) > 0 and worth
        if self.phase is Phase.RUNNING and may_restart and not self._job_over:
            if together:
                return self._begin_restart(now, self._workers, failure, self._limits.regroup)
            left = kind in ("left", "silent")
            how = str(failure) if left else f"{task.name} failed: {failure.reason.summary}"
            again = f"started again {self._counted(task.restarts)}"
            return [Notify(f"{how}; {again}"), task.restart()]
        sudden = failure.reason.sudden and self.phase in (Phase.RUNNING, Phase.STOPPING)
        if sudden and not together and not self._is_awaited:
            return self._lose_worker(now, failure)
        if kind == "victim" and not together:
            if task.given_up is not None and self.phase is Phase.RUNNING:
                return self._lose_worker(now, failure)
            if self._job_over or (task.restarts and self._left):
                return [Notify(f"{task.name} came too late: the others had finished")]
        self._fail(now, failure)
        return []

    def _server_failed(self, now: float, task: SupervisedTask, failure: Failure) -> list[Action]:
        # Of a job that has failed it is a victim; of one that goes on it is not.
        by_itself = failure.reason.worth_a_restart or task.given_up is not None
        missed = not self._formed and self.restarts_left(task.name) <= 0  # all wait for it to join
        if by_itself and self.goes_on and self._limits.outlives_servers and not missed:
            return self._outlive_server(now, task, failure)
        if self._may_restart_all(failure) and not self._job_over:
            return self._restart_all(now, failure)
        if self.phase is Phase.ENDING or self._job_over:
            if self.verdict.failed:
                return []
            # The server's failure counts even if the workers seemed to end well.
            if failure.reason.kind != "victim":
                return [Notify(f"WARNING: {failure.name}, after the end: {failure.reason.summary}")]
        self._fail(now, failure)
        return []

    def _outlive_server(self, now: float, task: SupervisedTask, failure: Failure) -> list[Action]:
        if self.restarts_left(task.name) > 0 and self.phase is not Phase.STOPPING:
            again = f"started again {self._counted(task.restarts)}"
            text = f"WARNING: {failure}; {again}, to be filled by the other servers"
            return [Notify(text), task.restart()]
        self.verdict.lost.append(failure)
        left = sum(not other.worker for other in self._alive)
        if not left:
            self._fail(now)
            return [Notify(f"WARNING: {failure}, and no server is left")]
        return [
            Notify(f"WARNING: {failure}; the job goes on with the {counted(left, 'server')} left")
        ]

    def _lose_worker(self, now: float, failure: Failure) -> list[Action]:
        self.verdict.lost.append(failure)
        left = sum(task.alive for task in self._workers)
        if not left and not self._achieved:
            if self.phase is Phase.STOPPING:  # nothing is saved: `_conclude` reports it
                return [Notify(f"WARNING: {failure}, and no worker is left")]
            self._fail(now)
            return []
        self._last_worker = None if left else failure
        rest = f"the job goes on with the {left} left" if left else "the others had finished"
        return [Notify(f"WARNING: {failure}; {rest}")]

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

    # Restarts --------------------------------------------------------------------------------

    def _may_restart_all(self, failure: Failure) -> bool:
        only_victims = all(other.reason.kind == "victim" for other in self.verdict.failures)
        running = self.phase in (Phase.RUNNING, Phase.RESTARTING)
        going_on = running or (self.verdict.failed and only_victims)
        allowed = self.restarts_left(failure.name) > 0 and failure.reason.worth_a_restart
        return going_on and allowed and self._first_request is None

    def _restart_all(self, now: float, failure: Failure) -> list[Action]:
        """Ends all tasks, each of which may save first, to start the whole job again."""
        self.verdict.failed = False
        self.verdict.failures.clear()
        notice = Notify(
            f"WARNING: {failure}; the whole job is started again, from its newest checkpoint "
            f"{self._counted(self._whole_restarts)}"
        )
        tasks = list(self._tasks.values())
        return [notice, *self._begin_restart(now, tasks, failure, self._limits.save)]

    def _begin_restart(
        self, now: float, tasks: Sequence[SupervisedTask], failure: Failure, patience: float
    ) -> list[Action]:
        self.phase, self._phase_deadline = Phase.RESTARTING, now + patience
        self._restarting, self._causes = [*tasks], [failure]
        return self._proceed_with_restart(now)

    def _proceed_with_restart(self, now: float) -> list[Action]:
        alive = [task for task in self._restarting if task.alive]
        if not any(task.worker for task in alive) and self._phase_deadline is not None:
            # Servers have nothing to lose without workers.
            self._phase_deadline = min(self._phase_deadline, now + self._limits.give_up)
        if alive:
            return []
        if self._first_request is not None:
            self.phase = Phase.STOPPING
            return self._advance(now)
        self._phase_deadline, self._saved_early = None, False
        for task in self._tasks.values():
            task.finished = False
        if not all(task.worker for task in self._restarting):
            self.phase, self._joined, self._formed = Phase.STARTING, None, None
            self._whole_restarts += 1
            return [Notify(loss) for loss in losses(self._causes)]
        self.phase = Phase.RUNNING
        own = [failure for failure in self._causes if failure.reason.kind != "victim"]
        first = min(own or self._causes, key=lambda failure: failure.reason.at)
        notice = Notify(
            f"{first}; all workers are started again, from the newest checkpoint "
            f"{self._counted(self._restarting[0].restarts)}"
        )
        return [notice, *(worker.restart() for worker in self._restarting)]

    def _restart_too_late(self, now: float) -> list[Action]:
        alive = [task for task in self._restarting if task.alive]
        late = [task for task in alive if not task.killed]
        if not late:
            unkillable = f"{_names(alive)} cannot be killed: left to the kernel"
            self._fail(now, *self._causes)
            notice = Notify(f"{unkillable}, and nothing is started again")
            return [notice, *self._advance(now)]
        workers = _names([task for task in late if task.worker])
        killed = [Notify(f"{workers} did not end for the restart: killed")] if workers else []
        return [*killed, *self._kill(now, late)]

    def _counted(self, before: int) -> str:
        return f"({before + 1} of {self._limits.restarts})"

    # The job's end ---------------------------------------------------------------------------

    def _advance(self, now: float) -> list[Action]:
        """Goes on to the next phase when the last worker, or the last task, has ended."""
        alive, workers = self._alive, self._workers
        if self.phase in (Phase.STARTING, Phase.RESTARTING):
            return []
        if not alive:
            self._conclude()
            return []
        if self.phase is Phase.ENDING or any(task.worker for task in alive):
            return []
        if self.phase is Phase.RUNNING and not workers:
            return []  # they are not started yet
        self.phase = Phase.ENDING
        if any(task.killed for task in alive):
            return []
        hopeless = self.verdict.failed or self._joined is False
        patience = self._limits.give_up if hopeless else self._limits.end
        asked = any(task.terminated for task in workers)
        informed = self._left > 0 or (self.verdict.failed and not asked)
        self._phase_deadline = now + (patience if informed else 0.0)
        return self.tick(now)

    def _conclude(self) -> None:
        workers = [task.name for task in self._workers]
        if self._left and not self._saved_early and not self.verdict.unsaved:
            self.verdict.interrupted = False  # the request came when there was nothing left to do
        saved = self._left > 0
        self.verdict.settle(workers, self._joined, achieved=self._achieved, saved=saved)
        self.phase = Phase.DONE
        self._phase_deadline = None

    # What is known ---------------------------------------------------------------------------

    @property
    def _alive(self) -> list[SupervisedTask]:
        return [task for task in self._tasks.values() if task.alive]

    @property
    def _workers(self) -> list[SupervisedTask]:
        return [task for task in self._tasks.values() if task.worker]

    @property
    def _is_awaited(self) -> bool:
        """Whether a worker that ends now is one that the job, which forms, still waits for."""
        others = any(task.alive for task in self._workers)
        forming = self._limits.coordinated and self._formed is False
        return forming and others and self.phase is Phase.RUNNING

    @property
    def _left(self) -> int:
        return sum(task.finished and not task.dismissed for task in self._tasks.values())

    @property
    def _achieved(self) -> bool:
        return self._left > 0 or (self._job_over and bool(self._workers))


def _names(tasks: Iterable[SupervisedTask]) -> str:
    return ", ".join(task.name for task in tasks)
