"""The agent of one task: a process on the task's node that acts for a launcher on another node.

It starts the task, keeps its output until the launcher asks for it, and ends it. The task ends with
its agent.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from trireme.launch.config.task_config import TaskConfig
from trireme.launch.launcher import Event, TaskEnded
from trireme.launch.local import HostEngine

__all__ = [
    "NodeFacts",
    "StartRequest",
    "TaskAgent",
    "TaskReport",
    "host_identity",
    "installed_version",
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
        task: the task.
        program: the user's program and its arguments.
        directory: the directory to start it in.
        environ: variables of its environment, besides the node's own.
        host: the address of the node at which a server or coordinator listens, or at which a
            process group meets.
        attempt: the number of this start of the task, from 1. Requests to end it name it too.
    """

    task: TaskConfig
    program: tuple[str, ...]
    directory: str
    environ: Mapping[str, str]
    host: str
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class TaskReport:
    """What a task has printed and done since the report before.

    Attributes:
        lines: its lines, each with whether it went to standard error.
        events: what became of it, as its engine reports that. Nothing comes after its end.
        coordinator: of a coordinator, the address at which it listens; "" while it is not known.
        used: how much it has done: seconds of a core, plus a second for each line.
        now: the time of day on its node, in seconds since 1970. The clocks of two nodes may differ.
    """

    lines: tuple[tuple[bytes, bool], ...]
    events: tuple[Event, ...]
    coordinator: str
    used: float
    now: float


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


def installed_version() -> str:
    """Returns the version of Trireme on this node."""
    # Not an import: it would point upwards in the layers.
    version: str = sys.modules["trireme"].__version__
    return version


class TaskAgent:
    """Starts one task and reports on it. Any thread may call; call `start` before `report`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._lines: list[tuple[bytes, bool]] = []
        self._unread = 0
        self._events: list[Event] = []
        self._used = self._measured = 0.0
        self._engine: HostEngine | None = None  # while the task runs
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
        problem = ""
        if not os.path.isdir(directory):
            problem = f"there is no directory {directory}"
        elif not os.access(os.path.join(directory, script), os.R_OK):
            problem = f"{os.path.join(directory, script)} cannot be read"
        return NodeFacts(node, address, host_identity(), installed_version(), problem)

    def start(self, request: StartRequest) -> tuple[int, str]:
        """Starts the task, again if it has run before.

        Returns:
            Its process id; and `host:port` at which its process group meets, if this task serves
            that address, else "".

        Raises:
            OSError: the process cannot be started.
        """
        self._join()
        with self._changed:
            self._lines, self._unread, self._events = [], 0, []
            self._attempt = request.attempt
        started: Future[tuple[int, str]] = Future()
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
            self._changed.wait_for(lambda: self._lines or self._events, timeout)
            lines, self._lines, self._unread = tuple(self._lines), [], 0
            events, self._events = tuple(self._events), []
            engine = self._engine
            self._changed.notify_all()
        if engine is not None and time.monotonic() - self._measured >= 1.0:
            self._measured, self._used = time.monotonic(), engine.used(self._name)
        coordinator = "" if engine is None else engine.coordinator
        return TaskReport(lines, events, coordinator, self._used, time.time())

    def terminate(self, attempt: int) -> None:
        """Asks the task to end. If it has not started yet, it is asked as soon as it has."""
        with self._changed:
            self._terminated_attempt = max(self._terminated_attempt, attempt)
            if self._engine is not None and self._attempt <= attempt:
                self._engine.terminate(self._name)

    def kill(self, attempt: float) -> None:
        """Ends the task and its children at once, or as soon as it has started."""
        with self._changed:
            self._killed_attempt = max(self._killed_attempt, attempt)
            if self._engine is not None and self._attempt <= attempt:
                self._engine.kill(self._name)

    def shut_down(self) -> None:
        """Kills the task and waits for its end. The agent starts no other task after that."""
        self.kill(float("inf"))
        self._join()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join(JOIN_SECONDS)

    # On a thread of the task's own -----------------------------------------------------------

    def _run_task(self, request: StartRequest, started: Future[tuple[int, str]]) -> None:
        # Ray's threads may have signals blocked, and a child inherits that.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        with HostEngine(
            request.program,
            {**os.environ, **request.environ},
            lambda name, line, error: self._show(line, error),
            host=request.host,
            directory=Path(request.directory),
        ) as engine:
            try:
                started.set_result(self._start_task(engine, request))
            except BaseException as error:
                started.set_exception(error)
                return
            ended = False
            while not ended:
                events = engine.wait(POLL_SECONDS)
                ended = any(isinstance(event, TaskEnded) for event in events)
                with self._changed:
                    self._events += events
                    self._engine = None if ended else engine
                    self._changed.notify_all()

    def _start_task(self, engine: HostEngine, request: StartRequest) -> tuple[int, str]:
        with self._changed:
            engine.start(request.task)
            self._engine = engine
            if self._killed_attempt >= request.attempt:
                engine.kill(self._name)
            elif self._terminated_attempt >= request.attempt:
                engine.terminate(self._name)
        group = request.task.group
        meeting = "" if group is None else engine.process_groups.get(group, "")
        return engine.pids[self._name], meeting

    def _show(self, line: bytes, error: bool) -> None:
        with self._changed:
            # A launcher that falls behind slows the task down, as a full pipe does.
            self._changed.wait_for(
                lambda: self._unread < UNREAD_LIMIT or self._killed_attempt >= self._attempt,
                JOIN_SECONDS,
            )
            self._lines.append((line, error))
            self._unread += len(line)
            self._changed.notify_all()
