"""A job from its first task to its last: starts them, follows the supervision, tells the end.

Where the tasks are, and how they are started and heard there, an engine knows.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from trireme.launch.attendance import Attendance
from trireme.launch.console import Console
from trireme.launch.failure_report import failure_report
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
from trireme.launch.run_directory import RECORD, JobRecord, RunDirectory
from trireme.launch.supervision import Phase, Supervision
from trireme.launch.task_config import Role, TaskConfig

__all__ = [
    "Asked",
    "Attended",
    "Ended",
    "Engine",
    "Event",
    "Job",
    "Launcher",
    "Placed",
    "worker_tasks",
]

ADDRESS_TIMEOUT = 60.0
COORDINATOR = "coordinator:0"
STOOD_STILL = 5.0
"""A turn of the loop takes a second at most. Beyond this much more the launcher itself was stopped,
and could hear nobody."""


@dataclass(frozen=True, slots=True)
class Job:
    """One job.

    Attributes:
        program: the user's program and its arguments.
        task: what all tasks have in common: job, secret, counts, options.
        limits: how long and how often.
        options: what the user asked for, by option name, for `job.json`.
        address_timeout: seconds until the coordinator must have told its address.
    """

    program: tuple[str, ...]
    task: TaskConfig
    limits: Limits = field(default_factory=Limits)
    options: Mapping[str, Any] = field(default_factory=dict)
    address_timeout: float = ADDRESS_TIMEOUT


@dataclass(frozen=True, slots=True)
class Asked:
    """Somebody wants the job to stop."""


@dataclass(frozen=True, slots=True)
class Placed:
    """The engine knows a process id, a node or the coordinator's address that it did not know."""


@dataclass(frozen=True, slots=True)
class Attended:
    """The coordinator has said who takes part; it says so every second."""

    attendance: Attendance


@dataclass(frozen=True, slots=True)
class Ended:
    """A task has ended.

    Attributes:
        name: the task.
        status: its exit status, or minus the number of the signal that killed it.
        outcome: why.
        last_lines: the end of its output.
    """

    name: str
    status: int
    outcome: Outcome
    last_lines: tuple[str, ...]


Event = Asked | Attended | Placed | Ended


class Engine(Protocol):
    """Where tasks run. It shows and keeps their lines itself.

    Attributes:
        pids: the process id of every task that has one, by name.
        nodes: the node of every task that is not on this host, by name.
        coordinator: the address that the coordinator listens at; "" while it is not known.
    """

    pids: dict[str, int]
    nodes: dict[str, str]

    @property
    def coordinator(self) -> str: ...

    def start(self, config: TaskConfig) -> None:
        """Starts a task, or starts it again. Should that fail, it has `Ended`.

        The address of a coordinator that is started again is not known until it tells it.
        """

    def terminate(self, name: str) -> None:
        """Asks a task to end; one that has ended already is left alone."""

    def kill(self, name: str) -> None:
        """Ends a task and its children at once, if it has not ended already."""

    def used(self, name: str) -> float:
        """Returns how much a task has done: seconds of a core, and a second for each line."""

    def wait(self, seconds: float) -> Sequence[Event]:
        """Returns what has happened; waits for something to happen, but no longer than told.

        What the coordinator said comes before the ends of tasks.
        """


def worker_tasks(task: TaskConfig) -> list[TaskConfig]:
    """Returns the worker processes of a job: each alone, all together, or several to a worker.

    Args:
        task: what all tasks of the job have in common.
    """
    together = task.processes if task.servers else 1
    return [
        msgspec.structs.replace(
            task,
            index=index,
            rank=rank if task.servers else index,
            local_rank=index * together + rank,
        )
        for index in range(task.workers)
        for rank in range(together)
    ]


class Launcher:
    """One job, and the supervision that says what to do with its tasks."""

    def __init__(self, job: Job, directory: RunDirectory, console: Console, engine: Engine) -> None:
        self._job = job
        self._directory = directory
        self._console = console
        self._engine = engine
        self._supervision = Supervision(job.limits)
        self._tails: dict[str, Sequence[str]] = {}
        self._started = time.time()
        self._begin = time.monotonic()
        self._turned = self._begin
        self._heard: float | None = None  # when the coordinator last said who takes part
        self._unrecorded = False  # what happens cannot be recorded now
        self._removed = False  # the run directory is gone
        self._again = False  # the whole job is to be started again

    # From start to end -----------------------------------------------------------------------

    def run(self) -> None:
        """Starts all tasks and stays until the last one has ended."""
        self._start_all()
        while self._supervision.phase is not Phase.DONE:
            self._turn(1.0)
            if self._again:
                self._start_all()

    def _start_all(self) -> None:
        task = self._job.task
        self._again, self._heard = False, None
        if task.servers and self._supervision.phase is Phase.RUNNING:
            self._start("coordinator", 0)
            self._wait_for_address()
        if self._supervision.phase is not Phase.RUNNING or self._again:
            return
        for index in range(task.servers):
            self._start("ps", index)
        if task.host_aggregator:
            self._start("aggregator", 0)
        for config in worker_tasks(task):
            self._start_task(config)
        self._record("running", None)

    def conclude(self) -> int:
        """Says how the job ended and returns its exit status."""
        supervision, seconds = self._supervision, time.monotonic() - self._begin
        logs = self._directory.path / "logs"
        status = supervision.status
        if supervision.failed:
            report = failure_report(
                supervision,
                seconds=seconds,
                log=self._directory.log,
                last_lines=lambda name: self._tails.get(name, ()),
            )
            for line in report:
                self._console.say(line, alarm=True)
            self._record("failed", status, report)
        elif supervision.unsaved:
            names = ", ".join(supervision.unsaved)
            self._console.say(f"ended after {seconds:.1f} s; {names} did not save", alarm=True)
            self._record("interrupted", status)
        elif supervision.interrupted:
            self._console.say(f"interrupted after {seconds:.1f} s; logs in {logs}")
            self._record("interrupted", status)
        else:
            self._console.say(f"finished in {seconds:.1f} s; logs in {logs}")
            self._record("finished", status)
        return status

    def _record(self, state: str, status: int | None, failure: Sequence[str] = ()) -> None:
        try:
            self._directory.write_record(self._job_record(state, status, failure))
        except OSError as error:
            if not self._unrecorded:
                self._console.say(
                    f"WARNING: {self._directory.path / RECORD} cannot be written "
                    f"({error.strerror}): `trireme status` may show what was so before",
                    alarm=True,
                )
            self._unrecorded = True
        else:
            self._unrecorded = False

    def _job_record(self, state: str, status: int | None, failure: Sequence[str]) -> JobRecord:
        job = self._job
        return JobRecord(
            job=job.task.job,
            state=state,
            status=status,
            host=socket.gethostname(),
            launcher=os.getpid(),
            pids=self._engine.pids,
            nodes=self._engine.nodes,
            coordinator=self._engine.coordinator,
            secret_file=str(self._directory.secret_file.resolve()),
            command=job.program,
            options=dict(job.options),
            origins=job.task.origins,
            started=self._started,
            ended=None if status is None else time.time(),
            failure=tuple(failure),
        )

    # Starting --------------------------------------------------------------------------------

    def _start(self, role: Role, index: int) -> None:
        self._start_task(msgspec.structs.replace(self._job.task, role=role, index=index, rank=0))

    def _start_task(self, config: TaskConfig) -> None:
        self._supervision.started(config.name)
        self._engine.start(
            msgspec.structs.replace(
                config,
                coordinator="" if config.role == "coordinator" else self._engine.coordinator,
                restarts_left=self._supervision.restarts_left(config.name),
            )
        )

    def _restart(self, name: str, left: int) -> None:
        config = next(config for config in worker_tasks(self._job.task) if config.name == name)
        self._engine.start(
            msgspec.structs.replace(
                config, coordinator=self._engine.coordinator, restarts_left=left
            )
        )
        self._record("running", None)

    def _wait_for_address(self) -> None:
        """Waits until the coordinator has told where it listens, or will not."""
        deadline = time.monotonic() + self._job.address_timeout
        while self._supervision.phase is Phase.RUNNING and not self._engine.coordinator:
            if self._again:
                return
            if time.monotonic() > deadline:
                self._console.say(
                    f"{COORDINATOR} did not listen within {self._job.address_timeout:.0f} s",
                    alarm=True,
                )
                self._engine.kill(COORDINATOR)
                deadline = float("inf")
            self._turn(0.01)

    # One turn of the loop --------------------------------------------------------------------

    def _turn(self, longest: float) -> None:
        now = time.monotonic()
        deadline = self._supervision.deadline
        wait = longest if deadline is None else min(longest, max(0.0, deadline - now))
        for event in self._engine.wait(wait):
            self._happened(event)
        now = time.monotonic()
        self._look(now)
        self._carry_out(self._supervision.tick(now))

    def _look(self, now: float) -> None:
        """Looks at the tasks that nobody else hears of: the coordinator, and who outlives it."""
        if now - self._turned < 1.0:
            return
        stood_still, self._turned = now - self._turned > STOOD_STILL, now
        if self._heard is not None and stood_still:
            self._heard = now
        if not self._removed and not (self._directory.path / "logs").exists():
            self._removed = True
            self._console.say(
                f"WARNING: the run directory {self._directory.path} was removed: what the tasks "
                "print is kept nowhere; `trireme status` and `trireme stop` do not find this job",
                alarm=True,
            )
        quiet = 0.0 if self._heard is None else now - self._heard
        if quiet > self._job.limits.silence:
            self._heard = None
            summary = f"given up and killed: it said nothing for {quiet:.0f} s"
            outcome = Outcome(kind="hung", summary=summary, at=time.time())
            self._carry_out(self._supervision.silent(now, COORDINATOR, outcome))
        for name in self._supervision.outliving:
            self._carry_out(self._supervision.worked(now, name, self._engine.used(name)))

    def _happened(self, event: Event) -> None:
        now = time.monotonic()
        match event:
            case Asked():
                self._carry_out(self._supervision.interrupt(now))
            case Ended(name, status, outcome, last_lines):
                self._tails[name] = last_lines
                if name == COORDINATOR:
                    self._heard = None
                self._carry_out(self._supervision.exited(now, name, status, outcome))
            case Attended(attendance):
                self._heard = now
                self._attended(now, attendance)
            case Placed():
                if self._supervision.phase is Phase.RUNNING:
                    self._record("running", None)

    def _attended(self, now: float, attendance: Attendance) -> None:
        pids = self._engine.pids
        lost = {
            task.name: Outcome(
                kind="hung", summary=f"given up and killed: {task.reason}", at=time.time()
            )
            for task in attendance.lost
            if pids.get(task.name) == task.pid  # else another process has come in its place
        }
        self._carry_out(
            self._supervision.attended(now, attendance.joined, lost, formed=attendance.formed)
        )

    def _carry_out(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Say(text):
                    self._console.say(text, alarm=text.startswith("WARNING"))
                case Terminate(name):
                    self._engine.terminate(name)
                case Kill(name):
                    self._engine.kill(name)
                case Restart(name, left):
                    self._restart(name, left)
                case RestartAll():
                    self._again = True
