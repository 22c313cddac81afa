"""The agent of one task: a process on the task's node that acts for a launcher on another node.

It starts the task, keeps its output until the launcher asks for it, and ends it. The task ends with
its agent.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from trireme.launch.config.task_config import TaskConfig
from trireme.launch.launcher import TaskEnded
from trireme.launch.local import HostEngine
from trireme.launch.process_setup.program import MODULE
from trireme.version import __version__

POLL_SECONDS = 0.05
UNREAD_LIMIT = 1 << 22
JOIN_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What an agent finds on its node."""

    node: str  # its name
    address: str  # as the other nodes know it
    host: str  # which two nodes share if and only if they reach each other at loopback addresses
    hostname: str  # as the task's process knows it
    version: str  # of Trireme
    problem: str = ""  # why no task can run there

    @property
    def fails_as_one(self) -> str:
        """The name of what is lost as one, so that the copies of a parameter are not both there."""
        return f"{self.hostname}/{self.node}"

    def __str__(self) -> str:
        return f"{self.address} ({self.node})"


@dataclass(frozen=True, slots=True)
class TaskReport:
    """What a task has printed and done since the report before."""

    lines: tuple[tuple[bytes, bool], ...]  # each with whether it went to standard error
    ended: TaskEnded | None  # how it has ended; nothing comes after that
    now: float  # the time of day on its node: the clocks of two nodes may differ


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

    def __init__(self, name: str, program: Sequence[str], directory: str) -> None:
        self._name = name
        self._program = program
        self._directory = Path(directory)
        self._changed = threading.Condition()
        self._lines: list[tuple[bytes, bool]] = []
        self._unread = 0
        self._ended: TaskEnded | None = None
        self._engine: HostEngine | None = None  # while the task runs
        self._thread: threading.Thread | None = None
        self._attempt = 0
        # The attempts up to which the task is sent each signal.
        self._signalled = dict.fromkeys((signal.SIGKILL, signal.SIGTERM, signal.SIGINT), 0.0)

    def inspect(self, node: str, address: str) -> NodeFacts:
        """Returns what this node is, and whether a task can run here."""
        script, problem = self._directory / self._program[0], ""
        if not self._directory.is_dir():
            problem = f"there is no directory {self._directory}"
        elif self._program[0] != MODULE and not os.access(script, os.R_OK):
            problem = f"{script} cannot be read"
        hostname = socket.gethostname()
        return NodeFacts(node, address, host_identity(), hostname, __version__, problem)

    def start(
        self, task: TaskConfig, environ: Mapping[str, str], host: str, attempt: int
    ) -> tuple[int, str]:
        """Starts the task, again if it has run before."""
        self._join()
        with self._changed:
            self._lines, self._unread, self._ended = [], 0, None
            self._attempt = attempt
        started: Future[tuple[int, str]] = Future()
        # The kernel ends the task with the thread that started it, so that thread lives as long.
        self._thread = threading.Thread(
            target=self._run_task,
            args=(task, environ, host, started),
            name=f"task-{self._name}",
            daemon=True,
        )
        self._thread.start()
        return started.result()

    def report(self, timeout: float) -> TaskReport:
        """Waits for news of the task, at most `timeout` seconds, and returns it."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._ended, timeout)
            lines, self._lines, self._unread = tuple(self._lines), [], 0
            self._changed.notify_all()
        return TaskReport(lines, self._ended, time.time())

    def send_signal(self, number: signal.Signals, attempt: float) -> None:
        """Asks the task to end by SIGTERM, or ends it and its children at once by SIGKILL.

        If it has not started yet, that happens as soon as it has.
        """
        with self._changed:
            self._signalled[number] = max(self._signalled[number], attempt)
            if self._engine is not None and self._attempt <= attempt:
                self._engine.send_signal(self._name, number)

    def pass_on(self, number: signal.Signals) -> None:
        """Passes on a signal that the agent itself has received."""
        with self._changed:
            if self._engine is not None:
                self._engine.send_signal(self._name, number)

    def shut_down(self) -> None:
        """Kills the task and waits for its end. The agent starts no other task after that."""
        self.send_signal(signal.SIGKILL, float("inf"))
        self._join()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join(JOIN_SECONDS)

    def _run_task(
        self,
        task: TaskConfig,
        environ: Mapping[str, str],
        host: str,
        started: Future[tuple[int, str]],
    ) -> None:
        # Ray's threads may have signals blocked, and a child inherits that.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        with HostEngine(
            self._program,
            {**os.environ, **environ},
            lambda name, line, error: self._show(line, error),
            host=host,
            directory=self._directory,
        ) as engine:
            try:
                started.set_result(self._start_task(engine, task))
            except BaseException as error:
                started.set_exception(error)
                return
            ended: TaskEnded | None = None
            while ended is None:
                events = engine.wait(POLL_SECONDS)
                ended = next((each for each in events if isinstance(each, TaskEnded)), None)
                with self._changed:
                    self._ended, self._engine = ended, None if ended else engine
                    self._changed.notify_all()

    def _start_task(self, engine: HostEngine, task: TaskConfig) -> tuple[int, str]:
        with self._changed:
            engine.start(task)
            self._engine = engine
            for number, attempt in self._signalled.items():
                if attempt >= self._attempt:
                    engine.send_signal(self._name, number)
        group = task.group_number
        meeting = "" if group is None else engine.process_groups.get(group, "")
        return engine.pids[self._name], meeting

    def _show(self, line: bytes, error: bool) -> None:
        with self._changed:
            # A launcher that falls behind slows the task down, as a full pipe does.
            self._changed.wait_for(
                lambda: (
                    self._unread < UNREAD_LIMIT or self._signalled[signal.SIGKILL] >= self._attempt
                ),
                JOIN_SECONDS,
            )
            self._lines.append((line, error))
            self._unread += len(line)
            self._changed.notify_all()
