"""Runs one job: starts its tasks, takes the actions of its supervision, reports its end.

An `Engine` knows where the tasks run, and how to start, end and watch them there.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from trireme.cluster.spec import OBSERVER
from trireme.launch.config.task_config import TaskConfig
from trireme.launch.exit_reason import INTERRUPTED, ExitReason
from trireme.launch.output import TaskOutputs
from trireme.launch.program_directory import forget_named, link_named, move_into
from trireme.launch.run_directory import JOURNAL, RECORD, JobRecord, RunDirectory
from trireme.launch.supervision import Supervision
from trireme.launch.supervision_state import (
    Action,
    Kill,
    Notify,
    Phase,
    Restart,
    Start,
    SupervisionLimits,
    Terminate,
)
from trireme.launch.task_messages import Listening, MembershipReport
from trireme.launch.verdict import failure_report
from trireme.process_birth import process_birth

if TYPE_CHECKING:
    from trireme.launch.config.authority import Authority

COORDINATOR = "coordinator:0"
_KEPT_EVENTS = 50
STALL_SECONDS = 5.0
"""A turn of the loop takes a second at most. After a turn that took longer than this the launcher
itself was stopped, so that silence in that time is not the coordinator's."""


@dataclass(frozen=True, slots=True)
class LostProcess:
    """The process of a server or worker that has ended otherwise than well.

    Attributes:
        role, index: which task it was.
        host: the name of its host.
        pid: its process id there.
        reason: why it ended, in a line.
    """

    role: str
    index: int
    host: str
    pid: int
    reason: str


Announce = Callable[[str, Sequence[LostProcess]], object]
"""Tells the coordinator at an address which processes have ended. It does not block."""


@dataclass(frozen=True, slots=True)
class Job:
    """One job.

    Attributes:
        program: the user's program and its arguments.
        task: what all tasks have in common: job, secret, counts, options.
        limits: how long things may take, and how often tasks are started again.
        authority: issues each task a certificate, where the tasks connect by TLS.
        announce: tells the coordinator of lost processes, so that it need not wait for their
            silence.
    """

    program: tuple[str, ...]
    task: TaskConfig
    limits: SupervisionLimits = field(default_factory=SupervisionLimits)
    authority: Authority | None = None
    announce: Announce = lambda address, lost: None

    def with_authority(self) -> Job:
        """Returns the job with an authority of its own, whose key stays in this process."""
        from trireme.launch.config.authority import Authority  # slow to load

        return replace(self, authority=Authority.make())


@dataclass(frozen=True, slots=True)
class StopSignalled:
    """A signal asked the launcher to stop the job."""


@dataclass(frozen=True, slots=True)
class TaskLocated:
    """The engine has learned a process id or a node."""


@dataclass(frozen=True, slots=True)
class TaskEnded:
    """A task has ended.

    Attributes:
        name: the task.
        status: its exit status, or minus the number of the signal that killed it.
        reason: why it ended.
    """

    name: str
    status: int
    reason: ExitReason


Event = StopSignalled | Listening | MembershipReport | TaskLocated | TaskEnded


class Engine(Protocol):
    """Where tasks run. The engine itself shows and keeps the lines that they print.

    Attributes:
        pids: the process id of every task that has one, by name.
        nodes: the node of every task that is not on this host, by name.
    """

    pids: dict[str, int]
    nodes: dict[str, str]

    def host(self, name: str) -> str:
        """Returns the name of the host that a task runs on, as its process knows it."""

    def start(self, config: TaskConfig) -> None:
        """Starts a task, or starts it again. A failure to do so is reported as `TaskEnded`."""

    def send_signal(self, name: str, number: signal.Signals) -> None:
        """Asks a task to end by SIGTERM, or ends it and its children at once by SIGKILL.

        A task that has ended already is left alone.
        """

    def dismiss(self, names: Collection[str]) -> None:
        """Takes note that these tasks, and no others, are to leave the job, or have left it.

        As soon as one has ended, what was held for it is given back. One that still waits for a
        place to run ends at once.
        """

    def used(self, name: str) -> float:
        """Returns how much a task has done: seconds of a core, and a second for each line."""

    def wait(self, seconds: float) -> Sequence[Event]:
        """Waits for events, at most so many seconds, and returns them.

        A report of the coordinator comes before the ends of tasks.
        """


def tasks_of_job(task: TaskConfig) -> list[TaskConfig]:
    """Returns the tasks of a job in the order of their start, the coordinator first.

    A worker has one process or several, each of which is a task.

    Args:
        task: what all tasks of the job have in common.
    """
    replace = msgspec.structs.replace
    servers = [replace(task, role="ps", index=index) for index in range(task.servers)]
    coordinators = [replace(task, role="coordinator")] if task.servers else []
    workers = [
        replace(
            task,
            index=index,
            rank=rank if task.servers else index,
            local_rank=index * together(task) + rank,
        )
        for index in range(task.workers)
        for rank in range(together(task))
    ]
    return [*coordinators, *servers, *workers]


def together(task: TaskConfig) -> int:
    """Returns how many processes each worker of a job has."""
    return task.processes if task.servers else 1


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
        self._coordinator = ""  # the address that it listens at, once that is known
        self._listen_due: float | None = None  # when a coordinator that was started must listen
        self._lost: dict[str, LostProcess] = {}  # the newest lost process of each task
        self._dismissed: set[str] = set()  # the tasks that the job is not to have any more
        self._report = MembershipReport()  # the newest one
        self._complete = False  # all tasks of the job's start were started
        self._requests = 0  # how often somebody has asked for other numbers of tasks
        self._started = time.time()
        self._begin = time.monotonic()
        self._last_check = self._begin
        self._last_report_at: float | None = None  # when the coordinator last reported its members
        self._events = deque[tuple[float, str]](maxlen=_KEPT_EVENTS)
        self._unrecorded = False  # `job.json` cannot be written now
        self._removed = False  # the run directory is gone
        self._named: Path | None = None  # the run directory that the program has named
        forget_named(directory.path)
        if job.authority is not None:
            directory.write_certificate(job.authority.issue(OBSERVER))

    # From start to end -----------------------------------------------------------------------

    def run(self) -> None:
        """Starts all tasks and returns when the last one has ended."""
        while self._supervision.phase is not Phase.DONE:
            if self._supervision.phase is Phase.STARTING:
                self._start_all()
            else:
                self._turn(1.0)

    def _start_all(self) -> None:
        self._last_report_at, self._coordinator, self._requests = None, "", 0
        self._report, self._complete = MembershipReport(), False
        self._lost.clear()
        self._tasks = {config.name: config for config in tasks_of_job(self._sized())}
        self._dismissed.clear()
        self._supervision.keep_only(self._tasks)
        for config in self._tasks.values():
            self._start(config)
            if config.role == "coordinator":
                self._wait_for_address()
                if self._supervision.phase is not Phase.RUNNING:
                    return
        self._complete = True
        self._record("running", None)
        self._carry_out(self._resized())

    def _sized(self) -> TaskConfig:
        """Returns what the tasks have in common, with as many tasks as the job is to have now."""
        task = self._job.task
        staying = [each for each in self._tasks.values() if each.name not in self._dismissed]
        servers = sum(each.role == "ps" for each in staying)
        workers = sum(each.role == "worker" for each in staying) // together(task)
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
        """Writes `job.json`, which `trireme status` reads."""
        task, culprit = self._job.task, self._supervision.verdict.culprit
        record = JobRecord(
            job=task.job,
            state=state,
            status=status,
            host=socket.gethostname(),
            launcher=os.getpid(),
            launcher_birth=process_birth(os.getpid()),
            pids=self._engine.pids,
            nodes=self._engine.nodes,
            coordinator=self._coordinator,
            secret_file=str(self._directory.secret_file.resolve()),
            certificate_file=str(self._directory.certificate_file.resolve())
            if self._job.authority is not None
            else "",
            command=self._job.program,
            options=task.config.values,
            origins=task.config.value_origins,
            started=self._started,
            ended=None if status is None else time.time(),
            failure=tuple(failure),
            traceback=culprit.reason.traceback if failure and culprit is not None else "",
            events=tuple(self._events),
        )
        try:
            self._directory.write_record(record)
        except OSError as error:
            if not self._unrecorded:
                self._console.say(
                    f"WARNING: {self._directory.path / RECORD} cannot be written "
                    f"({error.strerror}): `trireme status` may show an older state",
                    alarm=True,
                )
            self._unrecorded = True
        else:
            self._unrecorded = False

    # Starting --------------------------------------------------------------------------------

    def _start(self, config: TaskConfig) -> None:
        self._supervision.started(config.name)
        authority, task = self._job.authority, f"{config.role}:{config.index}"
        self._outputs.begin(config.name)
        if config.role == "coordinator":
            self._listen_due = time.monotonic() + self._job.limits.listen
            config = msgspec.structs.replace(
                config,
                listen=self._coordinator,  # the tasks know it by the address of its first start
                journal=str(self._directory.path.resolve() / JOURNAL),
                resumes=bool(self._coordinator),
            )
        self._engine.start(
            msgspec.structs.replace(
                config,
                coordinator=self._coordinator,
                certificates="" if authority is None else authority.issue(task),
                restarts_left=self._supervision.restarts_left(config.name),
            )
        )

    def _wait_for_address(self) -> None:
        """Waits until the coordinator listens, or has ended."""
        while self._supervision.phase is Phase.RUNNING and not self._coordinator:
            self._turn(0.01)

    # One turn of the loop --------------------------------------------------------------------

    def _turn(self, longest: float) -> None:
        now = time.monotonic()
        deadline = self._supervision.deadline
        wait = longest if deadline is None else min(longest, max(0.0, deadline - now))
        for event in self._engine.wait(wait):
            self._handle(event)
        self._find_named()
        now = time.monotonic()
        self._check_silent_tasks(now)
        self._carry_out(self._supervision.tick(now))

    def _find_named(self) -> None:
        """Links to this job in the directory that the program has named, once it has named one."""
        if self._named is None and self._job.task.config.run_dir is None:
            self._named = link_named(self._directory.path)

    def _check_silent_tasks(self, now: float) -> None:
        """Checks the tasks that no report covers: the coordinator, and workers that outlive it."""
        if now - self._last_check < 1.0:
            return
        stalled, self._last_check = now - self._last_check > STALL_SECONDS, now
        if self._last_report_at is not None and stalled:
            self._last_report_at = now
        if not self._removed and not (self._directory.path / "logs").exists():
            self._removed = True
            self._console.say(
                f"WARNING: the run directory {self._directory.path} was removed: what the tasks "
                "print is not kept, and `trireme status` and `trireme stop` do not find this job",
                alarm=True,
            )
        if self._listen_due is not None and now > self._listen_due:
            self._listen_due = None
            limit = self._job.limits.listen
            self._console.say(f"{COORDINATOR} did not listen within {limit:.0f} s", alarm=True)
            self._engine.send_signal(COORDINATOR, signal.SIGKILL)
        silence = 0.0 if self._last_report_at is None else now - self._last_report_at
        if silence > self._job.limits.silence:
            self._last_report_at = None
            summary = f"given up and killed: it sent nothing for {silence:.0f} s"
            reason = ExitReason(kind="hung", summary=summary)
            self._carry_out(self._supervision.hung(now, COORDINATOR, reason))
        for name in self._supervision.outliving_workers:
            self._carry_out(self._supervision.worker_used(now, name, self._engine.used(name)))

    def _handle(self, event: Event) -> None:
        now = time.monotonic()
        match event:
            case StopSignalled():
                self._carry_out(self._supervision.interrupt(now))
            case TaskEnded(name, status, reason):
                if name == COORDINATOR:
                    self._last_report_at = self._listen_due = None
                elif status not in (0, INTERRUPTED) and self._supervision.goes_on:
                    self._announce(name, reason)
                self._carry_out(self._supervision.exited(now, name, status, reason))
            case MembershipReport():
                self._last_report_at = now
                self._report = event
                self._carry_out(self._membership_reported(now, event))
                self._carry_out(self._resized())
            case Listening(address):
                self._coordinator, self._listen_due = address, None
                self._record("running", None)
                if self._lost:  # while a coordinator was away, or it died before it heard of them
                    self._job.announce(address, tuple(self._lost.values()))
            case TaskLocated():
                if self._supervision.phase is Phase.RUNNING:
                    self._record("running", None)

    def _membership_reported(self, now: float, report: MembershipReport) -> Sequence[Action]:
        pids = self._engine.pids
        lost = {
            task.name: ExitReason(kind="hung", summary=f"given up and killed: {task.reason}")
            for task in report.lost
            if pids.get(task.name) == task.pid  # else another process has taken its place
        }
        return self._supervision.membership_reported(now, report.joined, lost, formed=report.formed)

    def _announce(self, name: str, reason: ExitReason) -> None:
        """Tells the coordinator that a process has ended, if it was a member of the job."""
        config, pid = self._tasks[name], self._engine.pids.get(name)
        member = config.role == "ps" or not (self._job.task.servers and config.rank)
        if not self._coordinator or pid is None or not member:
            return
        host = self._engine.host(name)
        self._lost[name] = LostProcess(config.role, config.index, host, pid, reason.summary)
        self._job.announce(self._coordinator, (self._lost[name],))

    def _resized(self) -> Sequence[Action]:
        """Has the job the tasks that its coordinator wants."""
        report = self._report
        if not self._complete:
            return ()
        self._dismissed = {*report.dismissed}
        self._engine.dismiss(self._dismissed)
        asked, self._requests = report.requests > self._requests, report.requests
        return self._supervision.resized(report.wanted, report.dismissed, asked=asked)

    def _start_new(self, name: str) -> None:
        """Starts a task that the job has room for."""
        role, _, index = name.partition(":")
        config = msgspec.structs.replace(self._job.task, role=role, index=int(index))
        self._start(self._tasks.setdefault(name, config))

    def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Notify(text):
                    self._console.say(text, alarm=text.startswith("WARNING"))
                    self._events.append((round(time.monotonic() - self._begin, 1), text))
                case Terminate(name):
                    self._engine.send_signal(name, signal.SIGTERM)
                case Kill(name):
                    self._engine.send_signal(name, signal.SIGKILL)
                case Start(name):
                    self._start_new(name)
                    self._record("running", None)
                case Restart(name):
                    self._start(self._tasks[name])
                    self._record("running", None)
