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
import subprocess
import sys
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from trireme.cluster.spec import LOOPBACK
from trireme.launch.config.secret import SECRET_VARIABLE, secret_descriptor
from trireme.launch.config.task_config import TASK_VARIABLE, TASK_WORD, TaskConfig, encode_task
from trireme.launch.exit_reason import ExitReason, Kind, describe_status
from trireme.launch.launcher import Event, Job, Launcher, StopSignalled, TaskEnded, TaskLocated
from trireme.launch.output import Console, TaskOutputs
from trireme.launch.process import TEMPLATES, Child, TaskProcess, Template
from trireme.launch.process_setup.orphans import LAUNCH_VARIABLE, OrphanReaper
from trireme.launch.process_setup.resources import thread_variables, threads_of_task
from trireme.launch.process_setup.signals import requests_to_stop, signals
from trireme.launch.run_directory import RunDirectory

CommandBuilder = Callable[[TaskConfig, Sequence[str]], Sequence[str]]


def run_local(
    job: Job, directory: RunDirectory, console: Console, build_command: CommandBuilder | None = None
) -> int:
    """Runs a job to its end and returns its exit status.

    At the first SIGINT, SIGTERM or SIGHUP the workers save and end; at the second, all tasks end
    at once. Call it from the main thread.

    Args:
        job: what to run.
        directory: where its logs and its record go. It stays claimed.
        console: where the lines of its tasks go.
        build_command: returns the command line of a task; `task_command` by default.
    """
    threads = threads_of_task(os.environ, job.task.tasks)
    job = replace(job, task=msgspec.structs.replace(job.task, threads=threads))
    if job.task.config.network.tls and job.task.servers:
        job = job.with_authority()
    environ = {**os.environ, **thread_variables(os.environ, threads)}
    environ.pop(SECRET_VARIABLE, None)
    with signals() as (wakeup, waker), TaskOutputs(directory.log, console) as outputs:
        with HostEngine(job.program, environ, outputs.show, build_command) as engine:
            engine.take_signals(wakeup, waker)
            if job.task.config.launch.start == "auto":
                engine.fork_tasks(console)
            launcher = Launcher(job, directory, engine, outputs)
            launcher.run()
        return launcher.conclude()


class HostEngine:
    """An `Engine` whose tasks are processes of this host. Use it as a context manager."""

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
        # `host:port` at which each process group meets whose rank 0 was started here
        self.process_groups: dict[int, str] = {}
        self.own_host = LOOPBACK
        self._selector = selectors.DefaultSelector()
        self._waker: socket.socket | None = None
        self._program = program
        self._environ = environ
        self._show = show
        self._build_command = build_command or task_command
        self._host = host
        self._directory = directory
        self._launch_id = uuid.uuid4().hex
        self._reaper = OrphanReaper(self._launch_id)
        self._processes: dict[str, TaskProcess] = {}
        self._template: Template | None = None
        self._waiting: dict[str, TaskConfig] = {}  # for the template, in the order of their start
        self._events: list[Event] = []

    def __enter__(self) -> HostEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._processes.values():
            process.send_signal(signal.SIGKILL)
        if self._template is not None:
            self._template.close()
        self._selector.close()
        self._reaper.close()

    def take_signals(self, wakeup: socket.socket, waker: socket.socket) -> None:
        """Has `wait` end at signals, and at `wake`."""
        self._selector.register(wakeup, selectors.EVENT_READ)
        self._waker = waker

    def wake(self) -> None:
        # A full socket has woken the launcher already; with a closed one the job has ended.
        if self._waker is not None:
            with contextlib.suppress(OSError):
                self._waker.send(b"\0")

    def fork_tasks(self, console: Console) -> None:
        """Has tasks forked, where that is installed and safe, and no engine builds commands."""
        if "fork" in TEMPLATES and self._build_command is task_command:
            self._template = TEMPLATES.imported("fork", "open")(
                self._environment(), self._program, self._directory, console
            )
        if self._template is not None:
            self._selector.register(self._template.fileno(), selectors.EVENT_READ, self._template)

    def start(self, config: TaskConfig) -> None:
        if self._template is not None:
            self._waiting[config.name] = config
            self._start_waiting()
        else:
            self._start(config, None)

    def _start_waiting(self) -> None:
        while self._waiting and (self._template is None or self._template.ready):
            name = next(iter(self._waiting))
            self._start(self._waiting.pop(name), self._template)
            self._events.append(TaskLocated())

    def _start(self, config: TaskConfig, template: Template | None) -> None:
        name, group = config.name, config.group_number
        if group is not None and config.group.rank and not config.group.address:
            config = config.in_group(address=self.process_groups[group])  # rank 0 started first
        pipes = [os.pipe() for _ in range(3)]  # standard output and errors, messages
        readers = [os.fdopen(reader, "rb") for reader, _ in pipes]
        output, error, launcher = (writer for _, writer in pipes)
        try:
            with _inherited(config.inheriting(launcher=launcher), self._host) as config:
                if group is not None and not config.group.rank:
                    self.process_groups[group] = config.group.address
                child = self._child(config, template, output, error)
            process = TaskProcess(child, *readers, show=partial(self._show, name))
        except BaseException as problem:
            for reader in readers:
                reader.close()
            if not isinstance(problem, OSError):
                raise
            summary = f"--on {config.config.launch.on} cannot start it: {problem}"
            kind: Kind = "usage" if problem.filename else "error"  # of its command, or of the host
            self._events.append(TaskEnded(name, 127, ExitReason(kind=kind, summary=summary)))
            return
        finally:
            for writer in (output, error, launcher):
                os.close(writer)
        self._processes[name] = process
        self.pids[name] = process.pid
        for pipe in process.pipes:
            self._selector.register(pipe.stream, selectors.EVENT_READ, pipe)

    def _child(
        self, config: TaskConfig, template: Template | None, output: int, error: int
    ) -> Child:
        """Starts the process of a task, leader of a session and process group of its own.

        Ctrl-C on the terminal does not reach it: its launcher passes signals on.
        """
        command = self._build_command(config, self._program)
        if template is not None:
            forked = template.fork(config, command, output, error)
            self._drop_template_if_gone()
            if forked is not None:
                return forked
        return subprocess.Popen(
            command,
            env={**self._environment(), TASK_VARIABLE: encode_task(config)},
            cwd=self._directory,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=error,
            start_new_session=True,
            pass_fds=[*config.descriptors.values()],
        )

    def _environment(self) -> dict[str, str]:
        return {**self._environ, LAUNCH_VARIABLE: self._launch_id, "PYTHONUNBUFFERED": "1"}

    def host(self, name: str) -> str:
        return socket.gethostname()

    def send_signal(self, name: str, number: signal.Signals) -> None:
        process = self._processes.get(name)
        if process is not None:
            process.send_signal(number)
        elif self._waiting.pop(name, None) is not None:
            self._events.append(TaskEnded(name, -number, describe_status(-number)))

    def dismiss(self, names: Collection[str]) -> None:
        """Does nothing: of a process of this host that has ended, nothing is held."""

    def wait(self, seconds: float) -> list[Event]:
        events, self._events = self._events, []
        for key, _ in self._selector.select(0.0 if events else seconds):
            if key.data is None:
                events += map(StopSignalled, requests_to_stop(key.fd))
            elif key.data is self._template:
                self._look_at_template()
            elif key.data.read() == 0:
                self._selector.unregister(key.fileobj)
        if self._waiting and self._template is not None:  # it may never say that it is ready
            self._look_at_template()
        statuses = {name: process.poll() for name, process in self._processes.items()}
        ended = [
            self._ended(name, status) for name, status in statuses.items() if status is not None
        ]
        return events + ended

    def _look_at_template(self) -> None:
        assert self._template is not None  # it is registered
        self._template.look()
        if self._template.ready:
            self._reaper.close()  # the template does the same
        self._drop_template_if_gone()
        self._start_waiting()

    def _drop_template_if_gone(self) -> None:
        if self._template is not None and self._template.gone:
            self._selector.unregister(self._template.fileno())
            self._template.close()
            self._template = None
            self._reaper.close()
            self._reaper = OrphanReaper(self._launch_id)

    def _ended(self, name: str, status: int) -> TaskEnded:
        process = self._processes.pop(name)
        for pipe in process.pipes:
            with contextlib.suppress(KeyError):  # it was closed before
                self._selector.unregister(pipe.stream)
        return TaskEnded(name, status, process.finish(status))


def task_command(config: TaskConfig, program: Sequence[str]) -> list[str]:
    """Returns the command line of a child of this process that runs a task of a program.

    Everything else that the task has to know is in its environment.
    """
    return [
        *(sys.executable, "-m", "trireme", TASK_WORD, config.name, str(os.getpid())),
        *(program if config.role == "worker" else ()),
    ]


@contextlib.contextmanager
def _inherited(config: TaskConfig, host: str) -> Iterator[TaskConfig]:
    """Gives a task's configuration with its descriptors: one holds its secret and its key.

    For rank 0 of a process group another listens: no other process can take the group's port.
    """
    if config.role != "worker" and not config.listen:
        scheme = "tls" if config.certificates else config.config.scheme
        config = msgspec.structs.replace(config, listen=f"{scheme}://{host}:0")
    with contextlib.ExitStack() as stack:
        if config.group_number is not None and config.group.rank == 0:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            address = (host.strip("[]"), 0)
            listener = stack.enter_context(socket.create_server(address, family=family))
            config = config.in_group(address=f"{host}:{listener.getsockname()[1]}")
            config = config.inheriting(process_group=listener.fileno())
        yield stack.enter_context(secret_descriptor(config))
