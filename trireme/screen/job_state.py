"""Snapshots of a job, from the coordinator or from records, and findings about them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from trireme.cluster.messages import ClusterStatus, StatusValue
from trireme.cluster.progress import STUCK
from trireme.monitor.recording import CORRUPTED, UNSAVED
from trireme.records.numbers import number_of
from trireme.screen.placement import events, shortages

PHASES = ("data", "compute", "push", "wait", "apply")  # the phases of a step

SHOWN_PHASES = {"compute": "forward+backward"}  # the names of phases that are shown otherwise

SILENT_SECONDS = 1.3
"""After this time without a heartbeat a task is silent; tasks send one each second."""

WAIT_SECONDS = 0.5  # the shortest wait that is reported


@dataclass(frozen=True, slots=True)
class TaskSnapshot:
    """One task."""

    name: str
    state: str  # the state that a live task reports; otherwise the coordinator's state of it
    quiet: float = -1.0  # the seconds since its last heartbeat; -1 if unknown
    live: bool = True  # whether the coordinator considers it alive
    reason: str = ""  # the reason of its last change of state
    status: Mapping[str, StatusValue] = field(default_factory=dict)  # its last reported status

    @property
    def role(self) -> str:
        """The task's role, such as `worker`."""
        return self.name.partition(":")[0]

    def number(self, name: str) -> float:
        """Returns a number of its status; 0 if there is none."""
        return number_of(self.status, name)

    def phases(self) -> dict[str, float]:
        """Returns the mean seconds of its newest steps, by phase."""
        found = {name: self.number(f"{name}_seconds") for name in PHASES}
        return {name: seconds for name, seconds in found.items() if seconds > 0}


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """A job."""

    title: str
    phase: str  # the phase of the job, such as `running`
    seconds: float  # the seconds since it began
    tasks: Sequence[TaskSnapshot]  # the tasks, servers first
    missing: Sequence[str] = ()  # the tasks that it waits for before it can continue
    note: str = ""  # a further remark, such as why nothing newer is known
    # where the copies of the parameters are, in the coordinator's status; None where that is not
    # known
    placement: ClusterStatus | None = None

    def of(self, role: str) -> list[TaskSnapshot]:
        return [task for task in self.tasks if task.role == role]

    @property
    def step(self) -> int:
        """The global step."""
        return int(max((task.number("global_step") for task in self.tasks), default=0))

    @property
    def last_step(self) -> int:
        """The global step at which training ends; 0 if unknown."""
        return int(max((task.number("max_steps") for task in self.tasks), default=0))

    @property
    def pace(self) -> float:
        """The examples per second of all workers that are not silent."""
        workers = [task for task in self.of("worker") if task.live and not _silent(task)]
        return sum(worker.number("examples_per_second") for worker in workers)

    def lag(self, task: TaskSnapshot) -> int:
        """Returns the number of pushes that a worker is behind the furthest worker."""
        lags = [server.number(f"lag/{task.name}") for server in self.of("ps")]
        return int(max(lags, default=0))


def from_cluster(title: str, status: ClusterStatus, seconds: float) -> JobSnapshot:
    """Returns the snapshot of a running job, from its coordinator's status."""
    tasks = tuple(
        TaskSnapshot(
            name=task.name,
            state=str(task.status.get("state", "live")) if task.state == "live" else task.state,
            quiet=task.quiet_seconds,
            live=task.state == "live",
            reason=task.reason,
            status=task.status,
        )
        for task in status.tasks
    )
    placement = status if status.shards else None
    return JobSnapshot(title, status.phase, seconds, tasks, status.missing, placement=placement)


def findings(picture: JobSnapshot) -> list[str]:
    """Returns what is wrong with a job, gravest first.

    These are corrupted values, checkpoints that are not saved, lost tasks, missing copies, recent
    takeovers and rollbacks, stuck and silent tasks, and waits.
    """
    unsaved = [
        f"{task.name}: {alarm}"
        for field in (CORRUPTED, UNSAVED)
        for task in picture.tasks
        if task.live and (alarm := task.status.get(field))
    ]
    if picture.missing:
        return [*unsaved, f"the job waits for {', '.join(picture.missing)}"]
    gone = [
        f"{task.name} is {task.state}: {task.reason}"
        for task in picture.tasks
        if task.state in ("disconnected", "lost")
    ]
    stuck = [
        f"{task.name} is stuck: {standstill}"
        for task in picture.tasks
        if task.live and (standstill := task.status.get(STUCK))
    ]
    short = [] if picture.placement is None else [*shortages(picture.placement)]
    happened = events({task.name: task.status for task in picture.of("ps") if task.live})
    gone += [*short, *happened]
    return [*unsaved, *gone, *stuck, *_held_up(picture)]


def _held_up(picture: JobSnapshot) -> Iterator[str]:
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


def _silent(task: TaskSnapshot) -> bool:
    return task.quiet >= SILENT_SECONDS
