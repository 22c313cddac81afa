"""Starts the tasks of a job as processes of this host, and stays with them until all have ended.

Every process started here is gone when `run_local` returns; should the launcher itself be killed,
the kernel kills them (see `tether.py`), and a guard what they have started (see `guard.py`).
Single-threaded: the kernel ties a child's life to the thread that started it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from collections.abc import Sequence

import msgspec

from trireme.launch.attendance import AttendanceReader
from trireme.launch.command import CommandBuilder, TaskFiles, task_command
from trireme.launch.console import Console
from trireme.launch.guard import Guard
from trireme.launch.launcher import Asked, Attended, Ended, Event, Job, Launcher
from trireme.launch.outcome import describe_status, read_outcome
from trireme.launch.process import Pipe, TaskProcess
from trireme.launch.run_directory import RunDirectory
from trireme.launch.secret import SECRET_VARIABLE, handed_over
from trireme.launch.signals import requests_to_stop, signals
from trireme.launch.task_config import TASK_VARIABLE, TaskConfig, encode_task
from trireme.launch.threads import thread_variables

__all__ = ["run_local"]


def run_local(
    job: Job,
    directory: RunDirectory,
    console: Console,
    build_command: CommandBuilder = task_command,
) -> int:
    """Runs a job to its end and returns its exit status.

    SIGINT, SIGTERM or SIGHUP once: the workers save and end; twice: all end at once. To be called
    from the main thread.

    Args:
        job: what to run.
        directory: where its logs and its record go; stays claimed.
        console: where its tasks' lines go.
        build_command: how to start a task.

    Returns:
        0 finished; 1 a task failed; 2 a worker found that it was asked for something impossible;
        130 stopped by a signal, after the workers have saved and ended.
    """
    with signals() as wakeup, selectors.DefaultSelector() as selector, Guard() as guard:
        selector.register(wakeup, selectors.EVENT_READ, None)
        engine = _LocalEngine(job, directory, console, selector, build_command, guard)
        launcher = Launcher(job, directory, console, engine)
        try:
            launcher.run()
        finally:
            engine.kill_all()
        return launcher.conclude()


class _LocalEngine:
    """The processes of one job on this host."""

    def __init__(
        self,
        job: Job,
        directory: RunDirectory,
        console: Console,
        selector: selectors.BaseSelector,
        build_command: CommandBuilder,
        guard: Guard,
    ) -> None:
        self.pids: dict[str, int] = {}
        self.nodes: dict[str, str] = {}
        self._job = job
        self._directory = directory
        self._console = console
        self._selector = selector
        self._build_command = build_command
        self._guard = guard
        self._processes: dict[str, TaskProcess] = {}
        self._meetings: dict[int, str] = {}
        self._coordinator = ""
        self._attendance = AttendanceReader(self._files("coordinator:0").attendance)

    @property
    def coordinator(self) -> str:
        file = self._files("coordinator:0").address
        if not self._coordinator and file.exists():
            self._coordinator = file.read_text(encoding="utf-8").strip()
        return self._coordinator

    def start(self, config: TaskConfig) -> None:
        name = config.name
        files = self._files(name)
        for file in (files.outcome, files.address, files.attendance):
            file.unlink(missing_ok=True)
        if config.role == "coordinator":
            self._coordinator = ""
        with contextlib.ExitStack() as stack:
            config, fds = self._meeting(config, stack)
            secret = stack.enter_context(handed_over(config.secret, config.job))
            if secret is not None:
                config = msgspec.structs.replace(config, secret="", secret_fd=secret)
                fds = (*fds, secret)
            process = TaskProcess(
                name,
                self._build_command(config, files, self._job.program),
                self._environ(config),
                log=self._directory.log(name),
                emit=lambda line, error: self._console.line(name, line, error),
                complain=lambda text: self._console.say(text, alarm=True),
                pass_fds=fds,
            )
        self._processes[name] = process
        self.pids[name] = process.pid
        for pipe in process.pipes:
            self._selector.register(pipe.fd, selectors.EVENT_READ, (process, pipe))

    def terminate(self, name: str) -> None:
        if name in self._processes:  # else its end is told already, and being dealt with
            self._processes[name].terminate()

    def kill(self, name: str) -> None:
        if name in self._processes:
            self._processes[name].kill()

    def used(self, name: str) -> float:
        return self._processes[name].used() if name in self._processes else 0.0

    def kill_all(self) -> None:
        """Leaves nothing behind, even if this launcher itself went wrong."""
        for process in self._processes.values():
            process.kill()

    def wait(self, seconds: float) -> list[Event]:
        events: list[Event] = []
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                events += [Asked()] * requests_to_stop(key.fd)
            else:
                self._read(*key.data)
        ended = self._reap()
        attendance = self._attendance.news()
        if attendance is not None:
            events.append(Attended(attendance))
        return events + ended

    def _meeting(
        self, config: TaskConfig, stack: contextlib.ExitStack
    ) -> tuple[TaskConfig, Sequence[int]]:
        """Says where processes that hold a model together find each other.

        Rank 0, which is started first, inherits the socket: nobody else can take the port.
        """
        if config.role != "worker" or config.processes == 1:
            return config, ()
        gang = config.index if config.servers else 0
        if config.rank:
            return msgspec.structs.replace(config, gang=self._meetings[gang]), ()
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self._meetings[gang] = f"127.0.0.1:{listener.getsockname()[1]}"
        fd = listener.fileno()
        config = msgspec.structs.replace(config, gang=self._meetings[gang], gang_fd=fd)
        return config, (fd,)

    def _files(self, name: str) -> TaskFiles:
        # A program may change its working directory before it fails.
        stem = self._directory.scratch.resolve() / name.replace(":", "-").replace("/", "-")
        return TaskFiles(
            stem.with_suffix(".address"),
            stem.with_suffix(".outcome"),
            stem.with_suffix(".attendance"),
        )

    def _environ(self, config: TaskConfig) -> dict[str, str]:
        threads, variables = thread_variables(os.environ, config.tasks)
        task = encode_task(msgspec.structs.replace(config, threads=threads))
        told = {TASK_VARIABLE: task, "PYTHONUNBUFFERED": "1", **self._guard.variables}
        own = {name: value for name, value in os.environ.items() if name != SECRET_VARIABLE}
        return {**own, **variables, **told}

    def _read(self, process: TaskProcess, pipe: Pipe) -> None:
        if not process.read(pipe):
            self._selector.unregister(pipe.fd)

    def _reap(self) -> list[Event]:
        statuses = [(name, process.poll()) for name, process in self._processes.items()]
        return [self._ended(name, status) for name, status in statuses if status is not None]

    def _ended(self, name: str, status: int) -> Event:
        process = self._processes.pop(name)
        for pipe in process.pipes:
            with contextlib.suppress(KeyError):
                self._selector.unregister(pipe.fd)
        process.finish()
        outcome = read_outcome(self._files(name).outcome) or describe_status(status)
        return Ended(name, status, outcome, tuple(process.last_lines))
