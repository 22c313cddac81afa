"""A job at one moment, as `trireme top` shows it: from the coordinator, or from records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from trireme.cluster.messages import ClusterStatus, StatusValue
from trireme.cluster.progress import STUCK
from trireme.cluster.spec import task_name
from trireme.monitor.records import Start

__all__ = [
    "PHASES",
    "Picture",
    "TaskPicture",
    "findings",
    "from_cluster",
    "from_records",
    "span_of",
]

PHASES = ("data", "compute", "push", "wait", "apply")
"""What a step is made of; `compute` is forward and backward."""

SILENT_SECONDS = 1.3
"""A task whose heart beats each second is late then."""

WAIT_SECONDS = 0.5
"""A wait that is worth a word."""

_SLOW_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class TaskPicture:
    """One task.

    Attributes:
        name: such as `worker:0`.
        state: what it says of itself, or what the coordinator says where that is no longer true.
        quiet: how many seconds ago it was last heard; -1 where that is not known.
        live: whether the coordinator holds it for alive.
        reason: the last thing that happened to it.
        status: what it reported last, by name.
    """

    name: str
    state: str
    quiet: float = -1.0
    live: bool = True
    reason: str = ""
    status: Mapping[str, StatusValue] = field(default_factory=dict)

    @property
    def role(self) -> str:
        """Its role, such as `worker`."""
        return self.name.partition(":")[0]

    def number(self, name: str) -> float:
        """Returns something it reported as a number; 0 where it has not."""
        value = self.status.get(name, 0.0)
        return float(value) if isinstance(value, (int, float)) else 0.0

    def phases(self) -> dict[str, float]:
        """Returns the mean seconds of its newest steps, by phase; none that it has not."""
        found = {name: self.number(f"{name}_seconds") for name in PHASES}
        return {name: seconds for name, seconds in found.items() if seconds > 0}


@dataclass(frozen=True, slots=True)
class Picture:
    """A job.

    Attributes:
        title: which.
        phase: how far it is, such as `running`.
        seconds: since it began.
        missing: for whom it waits before it can go on.
        tasks: servers first.
        note: what else is to be said, such as why nothing newer is known.
    """

    title: str
    phase: str
    seconds: float
    tasks: Sequence[TaskPicture]
    missing: Sequence[str] = ()
    note: str = ""

    def of(self, role: str) -> list[TaskPicture]:
        """Returns the tasks of a role."""
        return [task for task in self.tasks if task.role == role]

    @property
    def step(self) -> int:
        """The global step."""
        return int(max((task.number("global_step") for task in self.tasks), default=0))

    @property
    def last_step(self) -> int:
        """The global step at which training ends; 0 where that is not known."""
        return int(max((task.number("max_steps") for task in self.tasks), default=0))

    @property
    def pace(self) -> float:
        """Examples per second of all workers that are heard."""
        workers = [task for task in self.of("worker") if task.live and not _silent(task)]
        return sum(worker.number("examples_per_second") for worker in workers)

    def lag(self, task: TaskPicture) -> int:
        """Returns by how many pushes a worker is behind the one that is furthest."""
        lags = [server.number(f"lag/{task.name}") for server in self.of("ps")]
        return int(max(lags, default=0))


def from_cluster(title: str, status: ClusterStatus, seconds: float) -> Picture:
    """Returns the picture of a job that runs, from what its coordinator says."""
    tasks = []
    for task in status.tasks:
        live = task.state == "live"
        says = str(task.status.get("state", task.state))
        tasks.append(
            TaskPicture(
                task_name(task.role, task.index),
                says if live else task.state,
                task.quiet_seconds,
                live,
                task.reason,
                task.status,
            )
        )
    return Picture(title, status.phase, seconds, tuple(tasks), status.missing)


def from_records(title: str, phase: str, starts: Sequence[Start], time: float) -> Picture:
    """Returns the picture of a job at a time of day, from what its tasks recorded."""
    newest: dict[str, TaskPicture] = {}
    for start in starts:
        before = [record for record in start.records if record.time <= time]
        if before:
            status = before[-1].status
            name = start.begin.task
            newest[name] = TaskPicture(name, str(status.get("state", "")), status=status)
    began, _ = span_of(starts)
    return Picture(title, phase, max(0.0, time - began), tuple(newest.values()))


def span_of(starts: Sequence[Start]) -> tuple[float, float]:
    """Returns the times of day at which the records begin and end; (0, 0) where there are none."""
    begins = [start.begin.time for start in starts]
    ends = [record.time for start in starts for record in start.records]
    return (min(begins), max([*ends, *begins])) if begins else (0.0, 0.0)


def findings(picture: Picture) -> list[str]:
    """Returns what holds a job up, the gravest first: who is gone, silent, waited for, or slow."""
    if picture.missing:
        return [f"the job waits for {', '.join(picture.missing)}"]
    return [*_gone(picture), *_stuck(picture), *_held_up(picture), *_slow(picture)]


def _gone(picture: Picture) -> Iterator[str]:
    for task in picture.tasks:
        if task.state in ("disconnected", "lost"):
            yield f"{task.name} is {task.state}: {task.reason}"


def _stuck(picture: Picture) -> Iterator[str]:
    for task in picture.tasks:
        standstill = task.status.get(STUCK)
        if task.live and standstill:
            yield f"{task.name} is stuck: {standstill}"


def _held_up(picture: Picture) -> Iterator[str]:
    """Yields the silent, with who waits for them; and other waits."""
    waits: dict[str, str] = {}
    for server in picture.of("ps"):
        names, seconds = str(server.status.get("waiting_for", "")), server.number("waiting_seconds")
        if names and seconds >= WAIT_SECONDS:
            reason, who = server.status.get("waiting_reason"), str(server.status.get("waiting", ""))
            waits[names] = f"{who} {'wait' if ',' in who else 'waits'} for {names} ({reason})"
    for task in picture.tasks:
        if task.live and _silent(task):
            text = f"{task.name} has said nothing for {task.quiet:.1f} s"
            blamed = [name for name in waits if task.name in name.split(", ")]
            yield "; ".join([text, *(waits.pop(name) for name in blamed)])
    yield from waits.values()


def _slow(picture: Picture) -> Iterator[str]:
    if picture.step >= picture.last_step > 0:
        return  # all steps are made: whoever saves or evaluates now makes none
    paces = {
        worker.name: worker.number("examples_per_second")
        for worker in picture.of("worker")
        if worker.live and not _silent(worker) and worker.state == "training"
    }
    for name, pace in paces.items():
        others = [other for whose, other in paces.items() if whose != name]
        if others and pace < _SLOW_SHARE * median(others):
            yield f"{name} is slow: {pace:,.0f} examples/s, others {median(others):,.0f}"


def _silent(task: TaskPicture) -> bool:
    return task.quiet >= SILENT_SECONDS
