"""The restart of several tasks together: of all workers, or of the whole job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trireme.launch.actions import Action, Kill, Notify, Restart, RestartAll
from trireme.launch.supervised_task import SupervisedTask
from trireme.launch.supervision_limits import SupervisionLimits
from trireme.launch.verdict import Failure

__all__ = ["GroupRestart"]


class GroupRestart:
    """Tasks that must all end before they are started again together.

    Args:
        tasks: every task of the job by name; the supervision adds to it.
        limits: how long the tasks may take to end.

    Attributes:
        names: the tasks that are to be started again; empty while no restart is under way.
        causes: the failures that made the restart necessary, the first one first.
        deadline: when the tasks that have not ended by then are killed; None for never.
        whole_restarts: how often the whole job was started again.
    """

    def __init__(self, tasks: Mapping[str, SupervisedTask], limits: SupervisionLimits) -> None:
        self.names: list[str] = []
        self.causes: list[Failure] = []
        self.deadline: float | None = None
        self.whole_restarts = 0
        self._tasks = tasks
        self._limits = limits

    @property
    def under_way(self) -> bool:
        """Whether tasks are to be started again and have not all ended."""
        return bool(self.names)

    def begin(self, names: Sequence[str], cause: Failure, deadline: float) -> None:
        """Plans to start tasks again, once all of them have ended."""
        self.names, self.causes, self.deadline = list(names), [cause], deadline

    def cancel(self) -> list[Failure]:
        """Gives the restart up and returns its causes."""
        self.names, self.deadline = [], None
        return self.causes

    def proceed(self, now: float) -> list[Action]:
        """Starts the tasks again if all of them have ended."""
        tasks = [self._tasks[name] for name in self.names]
        alive = [task for task in tasks if task.alive]
        if not any(task.worker for task in alive):
            # Servers have nothing to lose without workers.
            limit = now + self._limits.give_up
            self.deadline = limit if self.deadline is None else min(self.deadline, limit)
        if alive:
            return []
        whole = len(tasks) == len(self._tasks)
        self.names, self.deadline = [], None
        if whole and any(not task.worker for task in tasks):
            self.whole_restarts += 1
            lost = {each.reason.loss: each.name for each in self.causes if each.reason.loss}
            return [*(Notify(f"{name}: {loss}") for loss, name in lost.items()), RestartAll()]
        return self._restart_workers(tasks)

    def _restart_workers(self, workers: Sequence[SupervisedTask]) -> list[Action]:
        own = [failure for failure in self.causes if failure.reason.kind != "victim"]
        first = min(own or self.causes, key=lambda failure: failure.reason.at)
        actions: list[Action] = [
            Notify(
                f"{first}; all workers are started again, from the newest checkpoint "
                f"({workers[0].restarts + 1} of {self._limits.restarts})"
            )
        ]
        for worker in workers:
            worker.restarts += 1
            worker.start()
            actions.append(Restart(worker.name, self._limits.restarts - worker.restarts))
        return actions

    def kill_late(self, now: float) -> list[Action]:
        """Kills the tasks that have not ended by the deadline; empty where all were killed."""
        late = [task for task in self._alive() if not task.killed]
        if not late:
            return []
        self.deadline = now + self._limits.kill
        for task in late:
            task.killed, task.due = True, None
        workers = ", ".join(task.name for task in late if task.worker)
        notice = [Notify(f"{workers} did not end for the restart: killed")] if workers else []
        return [*notice, *(Kill(task.name) for task in late)]

    def unkillable(self) -> Notify:
        """Returns the line about the tasks that live on although they were killed."""
        names = ", ".join(task.name for task in self._alive())
        return Notify(f"{names} cannot be killed: left to the kernel, and nothing is started again")

    def _alive(self) -> list[SupervisedTask]:
        return [self._tasks[name] for name in self.names if self._tasks[name].alive]
