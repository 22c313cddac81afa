"""What stays beside one task on its node, for a launcher that is on another.

It starts the task, gathers what that says until the launcher asks, tells it to end, and takes it
along when it ends itself.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trireme.launch.attendance import Attendance, AttendanceReader
from trireme.launch.command import TaskFiles, task_command
from trireme.launch.guard import Guard
from trireme.launch.outcome import Outcome, describe_status, read_outcome
from trireme.launch.process import TaskProcess
from trireme.launch.secret import handed_over
from trireme.launch.task_config import TASK_VARIABLE, decode_task, encode_task

__all__ = ["Born", "End", "NodeFacts", "Order", "Report", "TaskAgent", "host_identity"]

LOOK_AGAIN = 0.05
UNREAD = 1 << 22
LAST_WISH = 5.0


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What an agent finds where it is.

    Attributes:
        node: the node's name.
        address: its address, as the other nodes know it.
        host: the same for two nodes if and only if they reach each other at loopback addresses.
        version: Trireme's.
        problem: why no task can run here; "" if one can.
    """

    node: str
    address: str
    host: str
    version: str
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Order:
    """One task to start.

    Attributes:
        task: its `TaskConfig`, encoded.
        program: the user's program and its arguments.
        directory: where to start it.
        environ: what it finds in its environment besides the node's own.
        host: the address of the node at which a server or coordinator listens, or processes that
            hold a model together meet.
        attempt: how often it is started with this, from 1: ends are ordered by that number.
    """

    task: str
    program: tuple[str, ...]
    directory: str
    environ: Mapping[str, str]
    host: str
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class Born:
    """A task that was started.

    Attributes:
        pid: its process id.
        meeting: `host:port` at which it meets those that hold the model with it; empty where
            others serve that, or nobody has to meet.
    """

    pid: int
    meeting: str


@dataclass(frozen=True, slots=True)
class End:
    """How a task ended.

    Attributes:
        status: its exit status, or minus the number of the signal that killed it.
        outcome: why.
        age: how many seconds ago that was: the clocks of two nodes may differ.
    """

    status: int
    outcome: Outcome
    age: float


@dataclass(frozen=True, slots=True)
class Report:
    """What a task has said and done since the report before.

    Attributes:
        lines: each with whether it went to standard error.
        address: where it listens, if it has told.
        end: how it ended; nothing more comes after that.
        attendance: of a coordinator, who takes part, if it has said so.
        used: how much it has done: seconds of a core, and a second for each line.
    """

    lines: tuple[tuple[str, bool], ...]
    address: str
    end: End | None
    attendance: Attendance | None = None
    used: float = 0.0


def host_identity() -> str:
    """Returns what two processes share that reach each other at loopback addresses.

    That is the running kernel and, as containers and namespaces have a loopback of their own, the
    network namespace. Where the system has neither, it is its host's name.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return os.uname().nodename


def _listener(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host.strip("[]"), 0), family=family)


class TaskAgent:
    """The keeper of one task. Any thread may call; a start comes before its reports."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._lines: list[tuple[str, bool]] = []
        self._unread = 0
        self._address = ""
        self._attendance: Attendance | None = None
        self._used = self._measured = 0.0
        self._end: tuple[int, Outcome] | None = None
        self._process: TaskProcess | None = None
        self._guard: Guard | None = None
        self._thread: threading.Thread | None = None
        self._attempt = 0
        self._told = 0  # the attempts up to this one are to end
        self._doomed = 0.0  # those up to this one at once

    def look(self, node: str, address: str, directory: str, script: str) -> NodeFacts:
        """Returns what this node is, and whether a task can run here.

        Args:
            node: its name.
            address: its address.
            directory: where tasks are started.
            script: the user's program, as seen from there.
        """
        # The package above this module is there, and importing from it would point upwards.
        version: str = sys.modules["trireme"].__version__
        problem = ""
        if not os.path.isdir(directory):
            problem = f"there is no directory {directory}"
        elif not os.access(os.path.join(directory, script), os.R_OK):
            problem = f"{os.path.join(directory, script)} cannot be read"
        return NodeFacts(node, address, host_identity(), version, problem)

    def start(self, order: Order) -> Born:
        """Starts the task, again if it has run before.

        Raises:
            OSError: there can be no such process.
        """
        self._join()
        with self._changed:
            self._lines, self._unread, self._address, self._end = [], 0, "", None
            self._attendance = None
            self._attempt = order.attempt
        born: Future[Born] = Future()
        # The kernel ends the task with the thread that started it: a thread with the task's life.
        self._thread = threading.Thread(
            target=self._tend, args=(order, born), name=f"tend-{self._name}", daemon=True
        )
        self._thread.start()
        return born.result()

    def report(self, longest: float) -> Report:
        """Returns what is new; waits for something to be, but no longer than told."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._lines or self._address or self._attendance or self._end, longest
            )
            lines, self._lines, self._unread = tuple(self._lines), [], 0
            address, self._address = self._address, ""
            attendance, self._attendance = self._attendance, None
            process = self._process
            end = None
            if self._end is not None:
                status, outcome = self._end
                end = End(status, outcome, max(0.0, time.time() - outcome.at))
            self._changed.notify_all()
        if process is not None and time.monotonic() - self._measured >= 1.0:
            self._measured, self._used = time.monotonic(), process.used()
        return Report(lines, address, end, attendance, self._used)

    def terminate(self, attempt: int) -> None:
        """Asks the task to end; before its start, as soon as it has started."""
        with self._changed:
            self._told = max(self._told, attempt)
            if self._process is not None and self._attempt <= attempt:
                self._process.terminate()

    def kill(self, attempt: float) -> None:
        """Ends the task and its children at once; before its start, as soon as it has started."""
        with self._changed:
            self._doomed = max(self._doomed, attempt)
            if self._process is not None and self._attempt <= attempt:
                self._process.kill()

    def dismiss(self) -> None:
        """Kills the task, waits for its end, and lives with no other."""
        self.kill(float("inf"))
        self._join()
        if self._guard is not None:
            self._guard.close()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join(LAST_WISH)

    # On a thread of the task's own -----------------------------------------------------------

    def _tend(self, order: Order, born: Future[Born]) -> None:
        # A thread of somebody else's pool may have signals blocked, and a child inherits that.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        with (
            tempfile.TemporaryDirectory(prefix="trireme-") as scratch,
            selectors.DefaultSelector() as selector,
        ):
            files = TaskFiles(
                Path(scratch) / "address", Path(scratch) / "outcome", Path(scratch) / "attendance"
            )
            attendance = AttendanceReader(files.attendance)
            try:
                process, meeting = self._spawn(order, files)
            except BaseException as error:
                born.set_exception(error)
                return
            born.set_result(Born(process.pid, meeting))
            for pipe in process.pipes:
                selector.register(pipe.fd, selectors.EVENT_READ, pipe)
            while (status := process.poll()) is None:
                for key, _ in selector.select(LOOK_AGAIN):
                    if not process.read(key.data):
                        selector.unregister(key.fd)
                if not selector.get_map():  # its output is closed, and yet it lives
                    self._pause()
                self._tell_address(files.address)
                self._tell_attendance(attendance)
            self._tell_attendance(attendance)
            self._conclude(process, status, files.outcome)

    def _spawn(self, order: Order, files: TaskFiles) -> tuple[TaskProcess, str]:
        config = decode_task(order.task)
        with self._changed, contextlib.ExitStack() as stack:
            fds = []
            if config.role == "worker" and config.processes > 1 and config.rank == 0:
                # Nobody else can take a port that the task inherits.
                listener = stack.enter_context(_listener(order.host))
                fds = [listener.fileno()]
                meeting = f"{order.host}:{listener.getsockname()[1]}"
                config = msgspec.structs.replace(config, gang=meeting, gang_fd=fds[0])
            secret = stack.enter_context(handed_over(config.secret, config.job))
            if secret is not None:
                config = msgspec.structs.replace(config, secret="", secret_fd=secret)
                fds = [*fds, secret]
            if self._guard is None:
                self._guard = Guard()
            told = {TASK_VARIABLE: encode_task(config), "PYTHONUNBUFFERED": "1"}
            process = TaskProcess(
                self._name,
                task_command(config, files, order.program, host=order.host),
                {**os.environ, **order.environ, **told, **self._guard.variables},
                log=Path(os.devnull),  # the launcher keeps it
                emit=self._emit,
                pass_fds=fds,
                directory=Path(order.directory),
            )
            self._process = process
            if self._doomed >= order.attempt:
                process.kill()
            elif self._told >= order.attempt:
                process.terminate()
        return process, config.gang if config.gang_fd is not None else ""

    def _emit(self, line: str, error: bool) -> None:
        with self._changed:
            # A launcher that falls behind slows the task down, as a full pipe does.
            self._changed.wait_for(
                lambda: self._unread < UNREAD or self._doomed >= self._attempt, LAST_WISH
            )
            self._lines.append((line, error))
            self._unread += len(line)
            self._changed.notify_all()

    def _pause(self) -> None:
        with self._changed:
            self._changed.wait(LOOK_AGAIN)

    def _tell_address(self, file: Path) -> None:
        if file.exists():
            address = file.read_text(encoding="utf-8").strip()
            file.unlink()
            with self._changed:
                self._address = address
                self._changed.notify_all()

    def _tell_attendance(self, reader: AttendanceReader) -> None:
        news = reader.news()
        if news is not None:
            with self._changed:
                self._attendance = news
                self._changed.notify_all()

    def _conclude(self, process: TaskProcess, status: int, outcome: Path) -> None:
        with self._changed:
            self._process = None
        process.finish()
        with self._changed:
            self._end = (status, read_outcome(outcome) or describe_status(status))
            self._changed.notify_all()
