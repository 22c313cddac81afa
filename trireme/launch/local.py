"""Starts the tasks of a job as processes of this host, and returns when all have ended.

No process started here outlives `run_local`. If the launcher itself is killed, the kernel kills
its tasks, and a reaper kills what they have started (see `process_setup/orphans.py`).
Single-threaded: the kernel ties a child's life to the thread that started it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

import msgspec

from trireme.cluster.spec import LOOPBACK
from trireme.launch.config.secret import SECRET_VARIABLE, secret_descriptor
from trireme.launch.config.task_config import TASK_VARIABLE, TaskConfig, encode_task
from trireme.launch.launcher import Event, Job, Launcher, StopSignalled, TaskEnded
from trireme.launch.output import Console, TaskOutputs
from trireme.launch.process import TaskProcess
from trireme.launch.process_setup.orphans import OrphanReaper
from trireme.launch.process_setup.resources import thread_variables, threads_of_task
from trireme.launch.process_setup.signals import requests_to_stop, signals
from trireme.launch.run_directory import RunDirectory

CommandBuilder = Callable[[TaskConfig, Sequence[str]], Sequence[str]]


def run_local(
    job: Job,
    directory: RunDirectory,
    console: Console,
    build_command: CommandBuilder | None = None,
) -> int:
    """Runs a job to its end and returns its exit status.

    At the first SIGINT, SIGTERM or SIGHUP the workers save and end; at the second, all tasks end
    at once. Call it from the main thread.

    Args:
        job: what to run.
        directory: where its logs and its record go. It stays claimed.
        console: where the lines of its tasks go.
        build_command: returns the command line of a task; `task_command` by default.

    Returns:
        0 if the job finished; 1 if a task failed; 2 if a worker was asked for something
        impossible; 130 if a signal stopped the job and the workers have saved.
    """
    threads = threads_of_task(os.environ, job.task.tasks)
    job = replace(job, task=msgspec.structs.replace(job.task, threads=threads))
    if job.task.config.tls and job.task.servers:
        job = job.with_authority()
    environ = {**os.environ, **thread_variables(os.environ, threads)}
    environ.pop(SECRET_VARIABLE, None)
    with signals() as (wakeup, _), TaskOutputs(directory.log, console) as outputs:
        with HostEngine(job.program, environ, outputs.show, build_command) as engine:
            engine.selector.register(wakeup, selectors.EVENT_READ)
            launcher = Launcher(job, directory, engine, outputs)
            launcher.run()
        return launcher.conclude()


class HostEngine:
    """An `Engine` whose tasks are processes of this host. Use it as a context manager.

    Args:
        program: the user's program and its arguments.
        environ: the environment of the tasks, but for what tells each what it is.
        show: called with a task's name, each line that it prints, and whether that went to
            standard error.
        build_command: returns the command line of a task; `task_command` by default.
        host: the address of this host at which servers, the coordinator and process groups meet.
        directory: the directory to start tasks in; None for this process's own.

    Attributes:
        selector: waits for the tasks' pipes, and for the sockets of `signals` registered there.
        process_groups: `host:port` at which each process group meets whose rank 0 was started here.
    """

    def __init__(
        self,
        program: Sequence[str],
        environ: Mapping[str, str],
        show: Callable[[str, bytes, bool], None],
        build_command: CommandBuilder | None = None,
        host: str = LOOPBACK,
        directory: Path | None = None,
    ) -> None:
        self.pids: dict[str, int] = {}
        self.nodes: dict[str, str] = {}
        self.process_groups: dict[int, str] = {}
        self.selector = selectors.DefaultSelector()
        self._program = program
        self._environ = environ
        self._show = show
        self._build_command = build_command or task_command
        self._host = host
        self._directory = directory
        self._reaper = OrphanReaper()
        self._processes: dict[str, TaskProcess] = {}

    def __enter__(self) -> HostEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        """Kills every task that lives, even if the launcher itself failed."""
        for process in self._processes.values():
            process.send_signal(signal.SIGKILL)
        self.selector.close()
        self._reaper.close()

    def start(self, config: TaskConfig) -> None:
        name, group = config.name, config.group
        if group is not None and config.rank and not config.process_group:
            address = self.process_groups[group]  # rank 0 was started first
            config = msgspec.structs.replace(config, process_group=address)
        with _inherited(config, self._host) as (config, messages):
            fds = (
                *(config.launcher_fd, config.process_group_fd, config.secret_fd),
                *((config.call_fd, config.result_fd) if config.role == "worker" else ()),
            )
            process = TaskProcess(
                self._build_command(config, self._program),
                {
                    **self._environ,
                    **self._reaper.variables,
                    TASK_VARIABLE: encode_task(config),
                    "PYTHONUNBUFFERED": "1",
                },
                show=lambda line, error: self._show(name, line, error),
                messages=messages,
                pass_fds=[fd for fd in fds if fd is not None],
                directory=self._directory,
            )
        if group is not None and not config.rank:
            self.process_groups[group] = config.process_group
        self._processes[name] = process
        self.pids[name] = process.pid
        for pipe in process.pipes:
            self.selector.register(pipe.stream, selectors.EVENT_READ, pipe)

    def host(self, name: str) -> str:
        return socket.gethostname()

    def send_signal(self, name: str, number: signal.Signals) -> None:
        process = self._processes.get(name)
        if process is not None:
            process.send_signal(number)

    def dismiss(self, names: Collection[str]) -> None:
        """Does nothing: of a process of this host that has ended, nothing is held."""

    def used(self, name: str) -> float:
        process = self._processes.get(name)
        return 0.0 if process is None else process.used()

    def wait(self, seconds: float) -> list[Event]:
        events: list[Event] = []
        for key, _ in self.selector.select(seconds):
            if key.data is None:
                events += [StopSignalled()] * requests_to_stop(key.fd)
            elif key.data.read() == 0:
                self.selector.unregister(key.fileobj)
        statuses = {name: process.poll() for name, process in self._processes.items()}
        ended: list[Event] = []
        for name, status in statuses.items():
            process = self._processes[name]
            events += process.take_messages()
            if status is not None:
                ended.append(self._ended(name, status))
        return events + ended

    def _ended(self, name: str, status: int) -> TaskEnded:
        process = self._processes.pop(name)
        for pipe in process.pipes:
            with contextlib.suppress(KeyError):  # it was closed before
                self.selector.unregister(pipe.stream)
        return TaskEnded(name, status, process.finish(status))


def task_command(config: TaskConfig, program: Sequence[str]) -> list[str]:
    """Returns the command line of a child of this process that runs a task.

    Everything else that the task has to know is in its environment.

    Args:
        config: the task.
        program: the user's program and its arguments.
    """
    return [
        *(sys.executable, "-m", "trireme", "task"),
        *("--job-name", config.role, "--task-index", str(config.index)),
        *("--tied-to", str(os.getpid())),
        *(program if config.role == "worker" else ()),
    ]


@contextlib.contextmanager
def _inherited(config: TaskConfig, host: str) -> Iterator[tuple[TaskConfig, IO[bytes]]]:
    """Gives a task's configuration, with the descriptors that it inherits, and its messages.

    One descriptor is the task's end of the pipe of its messages. One holds its secret and its key.
    For rank 0 of a process group another one listens, so that no other process can take the port at
    which the group meets.

    Args:
        config: the task.
        host: the address of this host at which it listens, if it listens.
    """
    with contextlib.ExitStack() as stack:
        reader, writer = os.pipe()
        messages = os.fdopen(reader, "rb")  # closed by the task's process
        stack.callback(os.close, writer)
        config = msgspec.structs.replace(config, launcher_fd=writer)
        if config.role != "worker" and not config.listen:
            scheme = "tls" if config.certificates else "tcp"
            config = msgspec.structs.replace(config, listen=f"{scheme}://{host}:0")
        if config.group is not None and config.rank == 0:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            address = (host.strip("[]"), 0)
            listener = stack.enter_context(socket.create_server(address, family=family))
            config = msgspec.structs.replace(
                config,
                process_group=f"{host}:{listener.getsockname()[1]}",
                process_group_fd=listener.fileno(),
            )
        yield stack.enter_context(secret_descriptor(config)), messages
