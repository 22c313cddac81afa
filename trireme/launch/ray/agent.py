"""The agent of one task: a process on the task's node that acts for a launcher on another node.

It starts the task, keeps its output until the launcher asks for it, and ends it. The task ends with
its agent.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from trireme.launch.command import TaskFiles, inherited, task_command
from trireme.launch.config.task_config import TASK_VARIABLE, decode_task, encode_task
from trireme.launch.exit_reason import ExitReason, describe_status, read_exit_reason
from trireme.launch.membership_report import MembershipReport, MembershipReportReader
from trireme.launch.process import TaskProcess
from trireme.launch.process_setup.orphan_reaper import OrphanReaper

__all__ = [
    "NodeFacts",
    "ProcessEnd",
    "StartRequest",
    "TaskAgent",
    "TaskReport",
    "TaskStarted",
    "host_identity",
]

POLL_SECONDS = 0.05
UNREAD_LIMIT = 1 << 22
JOIN_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What an agent finds on its node.

    Attributes:
        node: the node's name.
        address: its address, as the other nodes know it.
        host: an identity that two nodes share if and only if they reach each other at loopback
            addresses.
        version: the version of Trireme on the node.
        problem: why no task can run on the node; "" if one can.
    """

    node: str
    address: str
    host: str
    version: str
    problem: str = ""


@dataclass(frozen=True, slots=True)
class StartRequest:
    """A request to start a task.

    Attributes:
        task: its `TaskConfig`, encoded.
        program: the user's program and its arguments.
        directory: the directory to start it in.
        environ: variables of its environment, besides the node's own.
        host: the address of the node at which a server or coordinator listens, or at which a
            process group meets.
        attempt: the number of this start of the task, from 1. Requests to end it name it too.
    """

    task: str
    program: tuple[str, ...]
    directory: str
    environ: Mapping[str, str]
    host: str
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class TaskStarted:
    """A task that was started.

    Attributes:
        pid: its process id.
        process_group: `host:port` at which its process group meets, if this task serves that
            address; else "".
    """

    pid: int
    process_group: str


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """How a task ended.

    Attributes:
        status: its exit status, or minus the number of the signal that killed it.
        reason: why it ended.
        age: how many seconds ago it ended. The clocks of two nodes may differ.
    """

    status: int
    reason: ExitReason
    age: float


@dataclass(frozen=True, slots=True)
class TaskReport:
    """What a task has printed and done since the report before.

    Attributes:
        lines: its lines, each with whether it went to standard error.
        address: the address at which it listens, if it has written that; else "".
        end: how it ended; None while it runs. Nothing comes after it.
        members: the report of a coordinator, if there is a new one.
        used: how much it has done: seconds of a core, plus a second for each line.
    """

    lines: tuple[tuple[str, bool], ...]
    address: str
    end: ProcessEnd | None
    members: MembershipReport | None = None
    used: float = 0.0


def host_identity() -> str:
    """Returns an identity that processes share if they reach each other at loopback addresses.

    It consists of the running kernel and of the network namespace, as containers have a loopback
    interface of their own. Where the system has neither, it is the host's name.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return os.uname().nodename


class TaskAgent:
    """Starts one task and reports on it. Any thread may call; call `start` before `report`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._lines: list[tuple[str, bool]] = []
        self._unread = 0
        self._address = ""
        self._membership_report: MembershipReport | None = None
        self._used = self._measured = 0.0
        self._end: tuple[int, ExitReason] | None = None
        self._process: TaskProcess | None = None
        self._reaper: OrphanReaper | None = None
        self._thread: threading.Thread | None = None
        self._attempt = 0
        self._terminated_attempt = 0  # the attempts up to this one are asked to end
        self._killed_attempt = 0.0  # the attempts up to this one are killed

    def inspect(self, node: str, address: str, directory: str, script: str) -> NodeFacts:
        """Returns what this node is, and whether a task can run here.

        Args:
            node: its name.
            address: its address.
            directory: where tasks are started.
            script: the user's program, as seen from there.
        """
        # Not an import: it would point upwards in the layers.
        version: str = sys.modules["trireme"].__version__
        problem = ""
        if not os.path.isdir(directory):
            problem = f"there is no directory {directory}"
        elif not os.access(os.path.join(directory, script), os.R_OK):
            problem = f"{os.path.join(directory, script)} cannot be read"
        return NodeFacts(node, address, host_identity(), version, problem)

    def start(self, request: StartRequest) -> TaskStarted:
        """Starts the task, again if it has run before.

        Raises:
            OSError: the process cannot be started.
        """
        self._join()
        with self._changed:
            self._lines, self._unread, self._address, self._end = [], 0, "", None
            self._membership_report = None
            self._attempt = request.attempt
        started: Future[TaskStarted] = Future()
        # The kernel ends the task with the thread that started it, so that thread lives as long.
        self._thread = threading.Thread(
            target=self._run_task,
            args=(request, started),
            name=f"task-{self._name}",
            daemon=True,
        )
        self._thread.start()
        return started.result()

    def report(self, timeout: float) -> TaskReport:
        """Waits for news of the task, at most `timeout` seconds, and returns it."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._lines or self._address or self._membership_report or self._end,
                timeout,
            )
            lines, self._lines, self._unread = tuple(self._lines), [], 0
            address, self._address = self._address, ""
            members, self._membership_report = self._membership_report, None
            process = self._process
            end = None
            if self._end is not None:
                status, reason = self._end
                end = ProcessEnd(status, reason, max(0.0, time.time() - reason.at))
            self._changed.notify_all()
        if process is not None and time.monotonic() - self._measured >= 1.0:
            self._measured, self._used = time.monotonic(), process.used()
        return TaskReport(lines, address, end, members, self._used)

    def terminate(self, attempt: int) -> None:
        """Asks the task to end. If it has not started yet, it is asked as soon as it has."""
        with self._changed:
            self._terminated_attempt = max(self._terminated_attempt, attempt)
            if self._process is not None and self._attempt <= attempt:
                self._process.terminate()

    def kill(self, attempt: float) -> None:
        """Ends the task and its children at once, or as soon as it has started."""
        with self._changed:
            self._killed_attempt = max(self._killed_attempt, attempt)
            if self._process is not None and self._attempt <= attempt:
                self._process.kill()

    def shut_down(self) -> None:
        """Kills the task and waits for its end. The agent starts no other task after that."""
        self.kill(float("inf"))
        self._join()
        if self._reaper is not None:
            self._reaper.close()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join(JOIN_SECONDS)

    # On a thread of the task's own -----------------------------------------------------------

    def _run_task(self, request: StartRequest, started: Future[TaskStarted]) -> None:
        # Ray's threads may have signals blocked, and a child inherits that.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        with (
            tempfile.TemporaryDirectory(prefix="trireme-") as scratch,
            selectors.DefaultSelector() as selector,
        ):
            files = TaskFiles(
                Path(scratch) / "address", Path(scratch) / "reason", Path(scratch) / "members"
            )
            reader = MembershipReportReader(files.membership_report)
            try:
                process, process_group = self._spawn(request, files)
            except BaseException as error:
                started.set_exception(error)
                return
            started.set_result(TaskStarted(process.pid, process_group))
            for pipe in process.pipes:
                selector.register(pipe.fd, selectors.EVENT_READ, pipe)
            while (status := process.poll()) is None:
                for key, _ in selector.select(POLL_SECONDS):
                    if not process.read(key.data):
                        selector.unregister(key.fd)
                if not selector.get_map():  # its output is closed, and it lives
                    self._pause()
                self._pass_address(files.address)
                self._pass_membership_report(reader)
            self._pass_membership_report(reader)
            self._conclude(process, status, files.exit_reason)

    def _spawn(self, request: StartRequest, files: TaskFiles) -> tuple[TaskProcess, str]:
        task = decode_task(request.task)
        with self._changed, inherited(task, request.host) as (config, fds):
            if self._reaper is None:
                self._reaper = OrphanReaper()
            set_here = {TASK_VARIABLE: encode_task(config), "PYTHONUNBUFFERED": "1"}
            process = TaskProcess(
                self._name,
                task_command(config, files, request.program, host=request.host),
                {**os.environ, **request.environ, **set_here, **self._reaper.variables},
                log=Path(os.devnull),  # the launcher keeps the log
                emit=self._emit,
                pass_fds=fds,
                directory=Path(request.directory),
            )
            self._process = process
            if self._killed_attempt >= request.attempt:
                process.kill()
            elif self._terminated_attempt >= request.attempt:
                process.terminate()
        return process, config.process_group if config.process_group_fd is not None else ""

    def _emit(self, line: str, error: bool) -> None:
        with self._changed:
            # A launcher that falls behind slows the task down, as a full pipe does.
            self._changed.wait_for(
                lambda: self._unread < UNREAD_LIMIT or self._killed_attempt >= self._attempt,
                JOIN_SECONDS,
            )
            self._lines.append((line, error))
            self._unread += len(line)
            self._changed.notify_all()

    def _pause(self) -> None:
        with self._changed:
            self._changed.wait(POLL_SECONDS)

    def _pass_address(self, file: Path) -> None:
        if file.exists():
            address = file.read_text(encoding="utf-8").strip()
            file.unlink()
            with self._changed:
                self._address = address
                self._changed.notify_all()

    def _pass_membership_report(self, reader: MembershipReportReader) -> None:
        news = reader.news()
        if news is not None:
            with self._changed:
                self._membership_report = news
                self._changed.notify_all()

    def _conclude(self, process: TaskProcess, status: int, reason: Path) -> None:
        with self._changed:
            self._process = None
        process.finish()
        with self._changed:
            self._end = (status, read_exit_reason(reason) or describe_status(status))
            self._changed.notify_all()
