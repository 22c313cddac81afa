"""Runs one job: starts its tasks, takes the actions of its supervision, reports its end.

An `Engine` knows where the tasks run, and how to start, end and watch them there.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import msgspec

from trireme.certificates import Authority, encryption
from trireme.cluster.spec import OBSERVER
from trireme.host import process_birth
from trireme.launch.config.task_config import TaskConfig
from trireme.launch.exit_reason import INTERRUPTED, ExitReason
from trireme.launch.output import TaskOutputs
from trireme.launch.program_directory import forget_named, link_named, move_into
from trireme.launch.run_directory import RECORD, JobRecord, RunDirectory
from trireme.launch.supervision import Supervision
from trireme.launch.supervision_state import (
    Action,
    Kill,
    Notify,
    Phase,
    Start,
    StopJob,
    SupervisionLimits,
    Terminate,
)
from trireme.launch.verdict import failure_report

COORDINATOR = "coordinator:0"
_KEPT_EVENTS = 50


@dataclass(frozen=True, slots=True)
class Membership:
    """The members of a job, as its coordinator knows them."""

    joined: bool = False  # any worker ever joined
    formed: bool = False  # all tasks joined at some time, so that the job began
    lost: Mapping[str, tuple[int, str]] = field(default_factory=dict)  # with process id and reason
    wanted: tuple[str, ...] = ()  # the tasks that the job is to have, and that have not left
    dismissed: tuple[str, ...] = ()  # those that leave, or left, as the job was made smaller
    requests: int = 0  # how often somebody has asked for other numbers of tasks
    over: str = ""  # how the job has ended, once every task knows that


class Coordinator(Protocol):
    """The job's coordinator, on a thread of this process. No method blocks for long."""

    address: str  # where it listens, with the scheme

    def membership(self) -> Membership:
        """Returns the members of the job now."""

    def process_ended(self, task: str, host: str, pid: int, reason: str) -> None:
        """Says that the process of a task has ended otherwise than well, and why."""

    def stop_job(self, reason: str) -> None:
        """Stops the job before its end, for a reason in words."""

    def close(self) -> None:
        """Ends it."""


Coordinate = Callable[[TaskConfig, Callable[[], object]], Coordinator]
"""Begins a job's coordinator, from its configuration. It calls the function, on its own thread,
whenever the membership has changed."""


@dataclass(frozen=True, slots=True)
class Job:
    """One job: its program with its arguments, and what all its tasks have in common."""

    program: tuple[str, ...]
    task: TaskConfig
    limits: SupervisionLimits = field(default_factory=SupervisionLimits)
    authority: Authority | None = None  # issues certificates, where the tasks connect by TLS
    coordinate: Coordinate | None = None  # begins the coordinator, where the job has one

    def with_authority(self) -> Job:
        """Returns the job with an authority of its own, whose key stays in this process."""
        return replace(self, authority=encryption().make_authority())


@dataclass(frozen=True, slots=True)
class StopSignalled:
    """A signal, by name, asked the launcher to stop the job."""

    signal: str


@dataclass(frozen=True, slots=True)
class TaskLocated:
    """The engine has learned a process id or a node."""


@dataclass(frozen=True, slots=True)
class TaskEnded:
    """A task has ended; the status of one that a signal killed is minus the signal's number."""

    name: str
    status: int
    reason: ExitReason


Event = StopSignalled | TaskLocated | TaskEnded


class Engine(Protocol):
    """Where tasks run. The engine itself shows and keeps the lines that they print."""

    pids: dict[str, int]  # of every task that has one, by name
    nodes: dict[str, str]  # of every task that is not on this host
    own_host: str  # the address of this host at which the tasks reach the coordinator

    def host(self, name: str) -> str:
        """Returns the name of the host that a task runs on, as its process knows it."""

    def start(self, config: TaskConfig) -> None:
        """Starts a task, or starts it again. A failure to do so is reported as `TaskEnded`."""

    def send_signal(self, name: str, number: signal.Signals) -> None:
        """Asks a task to end by SIGTERM or SIGINT, or ends it and its children by SIGKILL.

        A task that has ended already is left alone.
        """

    def dismiss(self, names: Collection[str]) -> None:
        """Takes note that these tasks, and no others, are to leave the job, or have left it.

        What is held for one is given back when it has ended, or at once where it waits for a place.
        """

    def wait(self, seconds: float) -> Sequence[Event]:
        """Waits for events, at most so many seconds, and returns them."""

    def wake(self) -> None:
        """Ends the wait that is under way, or the next one. Any thread may call it."""


def tasks_of_job(task: TaskConfig) -> list[TaskConfig]:
    """Returns the tasks of a job in the order of their start.

    A worker has one process or several, each of which is a task.
    """
    replace, each = msgspec.structs.replace, task.processes_per_worker
    servers = [replace(task, role="ps", index=index) for index in range(task.servers)]
    workers = [
        replace(task, index=index).in_group(
            rank=rank if task.servers else index, local_rank=index * each + rank
        )
        for index in range(task.workers)
        for rank in range(each)
    ]
    return [*servers, *workers]


class Launcher:
    """One job, and the supervision that decides what to do with its tasks."""

    def __init__(
        self, job: Job, directory: RunDirectory, engine: Engine, outputs: TaskOutputs
    ) -> None:
        self._job = job
        self._directory = directory
        self._console = outputs.console
        self._engine = engine
        self._supervision = Supervision(job.limits)
        self._tasks = {config.name: config for config in tasks_of_job(job.task)}
        self._outputs = outputs
        self._coordinator: Coordinator | None = None
        self._stopping = ""  # why the job is to stop, by the first signal
        self._address = ""  # of the coordinator
        self._dismissed: set[str] = set()  # the tasks that the job is not to have any more
        self._membership = Membership()  # as it was last looked at
        self._complete = False  # all tasks of the job's start were started
        self._requests = 0  # how often somebody has asked for other numbers of tasks
        self._started = time.time()
        self._begin = time.monotonic()
        self._events = deque[tuple[float, str]](maxlen=_KEPT_EVENTS)
        self._named: Path | None = None  # the run directory that the program has named
        forget_named(directory.path)
        if job.authority is not None:
            directory.write_certificate(job.authority.issue(OBSERVER))

    def run(self) -> None:
        try:
            while self._supervision.phase is not Phase.DONE:
                if self._supervision.phase is Phase.STARTING:
                    self._start_all()
                else:
                    self._turn(1.0)
        finally:
            self._end_coordinator()

    def _start_all(self) -> None:
        self._membership, self._complete, self._requests = Membership(), False, 0
        sized = self._sized()
        self._tasks = {config.name: config for config in tasks_of_job(sized)}
        self._dismissed.clear()
        self._supervision.keep_only(self._tasks)
        self._start_coordinator(sized)
        for config in self._tasks.values():
            self._start(config)
        self._complete = True
        self._record("running", None)
        self._carry_out(self._resized())

    def _sized(self) -> TaskConfig:
        task = self._job.task
        staying = [each for each in self._tasks.values() if each.name not in self._dismissed]
        servers = sum(each.role == "ps" for each in staying)
        workers = sum(each.role == "worker" for each in staying) // task.processes_per_worker
        if (servers, workers) == (task.servers, task.workers):
            return task
        config = task.config.replaced("trireme scale", ps=servers, workers=workers)
        return msgspec.structs.replace(task, servers=servers, workers=workers, config=config)

    def conclude(self) -> int:
        """Reports how the job ended and returns its exit status."""
        verdict, seconds = self._supervision.verdict, time.monotonic() - self._begin
        status, logs = verdict.status, self._directory.path / "logs"
        report: list[str] = []
        if verdict.failed:
            report = lines = failure_report(
                verdict, self._supervision.names, seconds, self._outputs
            )
        elif verdict.unsaved:
            lines = [f"ended after {seconds:.1f} s; {', '.join(verdict.unsaved)} did not save"]
        elif verdict.interrupted:
            lines = [f"interrupted after {seconds:.1f} s; logs in {logs}"]
        else:
            lines = [f"finished in {seconds:.1f} s; logs in {logs}"]
        for line in lines:
            self._console.say(line, alarm=verdict.failed or bool(verdict.unsaved))
        self._record(verdict.state, status, report)
        self._find_named()
        if self._named is not None:
            move_into(self._directory.path, self._named)
        return status

    def _record(self, state: str, status: int | None, failure: Sequence[str] = ()) -> None:
        task, culprit = self._job.task, self._supervision.verdict.culprit
        values = task.config.values
        record = JobRecord(
            job=task.job,
            state=state,
            status=status,
            host=socket.gethostname(),
            launcher=os.getpid(),
            launcher_birth=process_birth(os.getpid()),
            pids=self._engine.pids,
            nodes=self._engine.nodes,
            coordinator=self._address,
            secret_file=str(self._directory.secret_file.resolve()),
            certificate_file=str(self._directory.certificate_file.resolve())
            if self._job.authority is not None
            else "",
            command=self._job.program,
            options=values,
            origins={name: task.config.origin(name.replace("-", "_")) for name in values},
            started=self._started,
            ended=None if status is None else time.time(),
            failure=tuple(failure),
            traceback=culprit.reason.traceback if failure and culprit is not None else "",
            events=tuple(self._events),
        )
        try:
            self._directory.write_record(record)
        except OSError as error:
            self._console.say(
                f"WARNING: {self._directory.path / RECORD} cannot be written ({error.strerror}): "
                "`trireme status` may show an older state",
                alarm=True,
            )

    def _start_coordinator(self, task: TaskConfig) -> None:
        """Begins the coordinator anew: the tasks that knew the one before have all ended."""
        self._end_coordinator()
        if self._job.coordinate is None:
            return
        authority = self._job.authority
        config = msgspec.structs.replace(
            task,
            role="coordinator",
            listen=f"{'tls' if authority else task.config.scheme}://{self._engine.own_host}:0",
            certificates="" if authority is None else authority.issue(COORDINATOR),
            restarts_left=self._supervision.whole_restarts_left,
        )
        self._coordinator = self._job.coordinate(config, self._engine.wake)
        self._address = self._coordinator.address

    def _end_coordinator(self) -> None:
        if self._coordinator is not None:
            self._coordinator.close()
            self._coordinator = None

    def _start(self, config: TaskConfig) -> None:
        self._supervision.started(config.name)
        authority, task = self._job.authority, f"{config.role}:{config.index}"
        self._outputs.begin(config.name)
        self._engine.start(
            msgspec.structs.replace(
                config,
                coordinator=self._address,
                certificates="" if authority is None else authority.issue(task),
                restarts_left=self._supervision.restarts_left(config.name),
            )
        )

    def _turn(self, longest: float) -> None:
        now = time.monotonic()
        deadline = self._supervision.deadline
        wait = longest if deadline is None else min(longest, max(0.0, deadline - now))
        events = self._engine.wait(wait)
        self._look_at_members(time.monotonic())  # it comes before the ends of tasks
        for event in events:
            self._handle(event)
        self._find_named()
        now = time.monotonic()
        self._carry_out(self._supervision.tick(now))

    def _find_named(self) -> None:
        if self._named is None and self._job.task.config.output.run_dir is None:
            self._named = link_named(self._directory.path)

    def _handle(self, event: Event) -> None:
        now = time.monotonic()
        match event:
            case StopSignalled(name):
                self._stopping = self._stopping or f"{name} to the launcher"
                self._carry_out(self._supervision.interrupt(now))
            case TaskEnded(name, status, reason):
                if status not in (0, INTERRUPTED) and self._supervision.goes_on:
                    self._report_ended(name, reason)
                self._carry_out(self._supervision.exited(now, name, status, reason))
            case TaskLocated():
                if self._supervision.phase is Phase.RUNNING:
                    self._record("running", None)

    def _look_at_members(self, now: float) -> None:
        """Takes in which tasks the coordinator has given up, and which the job is to have."""
        if self._coordinator is None:
            return
        members, pids = self._coordinator.membership(), self._engine.pids
        self._membership = members
        lost = {
            name: ExitReason(kind="hung", summary=f"given up and killed: {reason}")
            for name, (pid, reason) in members.lost.items()
            if pids.get(name) == pid  # else another process has taken its place
        }
        take = self._supervision.membership_reported
        self._carry_out(take(now, members.joined, lost, formed=members.formed))
        self._carry_out(self._resized())
        if members.over:
            self._carry_out(self._supervision.job_over(now, members.over))

    def _report_ended(self, name: str, reason: ExitReason) -> None:
        config, pid = self._tasks[name], self._engine.pids.get(name)
        member = config.role == "ps" or not (self._job.task.servers and config.group.rank)
        if self._coordinator is not None and pid is not None and member:
            task, host = f"{config.role}:{config.index}", self._engine.host(name)
            self._coordinator.process_ended(task, host, pid, reason.summary)

    def _resized(self) -> Sequence[Action]:
        members = self._membership
        if not self._complete:
            return ()
        self._dismissed = {*members.dismissed}
        self._engine.dismiss(self._dismissed)
        asked, self._requests = members.requests > self._requests, members.requests
        return self._supervision.resized(members.wanted, members.dismissed, asked=asked)

    def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Notify(text):
                    self._console.say(text, alarm=text.startswith("WARNING"))
                    self._events.append((round(time.monotonic() - self._begin, 1), text))
                case Terminate(name):
                    # Where nobody else tells the workers why, the signal itself does.
                    alone = self._coordinator is None and self._stopping.startswith("SIGINT")
                    number = signal.SIGINT if alone else signal.SIGTERM
                    self._engine.send_signal(name, number)
                case StopJob():
                    if self._coordinator is not None:
                        self._coordinator.stop_job(self._stopping)
                case Kill(name):
                    self._engine.send_signal(name, signal.SIGKILL)
                case Start(name):
                    role, _, index = name.partition(":")
                    new = msgspec.structs.replace(self._job.task, role=role, index=int(index))
                    self._start(self._tasks.setdefault(name, new))
                    self._record("running", None)
