"""Starts the tasks of a job as processes of this host, and stays with them until all have ended.

Every process started here is gone when `run_local` returns; should the launcher itself be killed,
the kernel kills them (see `tether.py`). Single-threaded: the kernel ties a child's life to the
thread that started it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from trireme.launch.console import Console
from trireme.launch.detect import TASK_VARIABLE, Role, TaskConfig, encode_task
from trireme.launch.failure_report import failure_report
from trireme.launch.outcome import describe_status, read_outcome
from trireme.launch.process import Pipe, TaskProcess
from trireme.launch.run_directory import JobRecord, RunDirectory
from trireme.launch.supervision import (
    Instruction,
    Kill,
    Limits,
    Phase,
    Restart,
    Say,
    Supervision,
    Terminate,
)
from trireme.launch.threads import thread_variables

__all__ = ["LocalJob", "TaskFiles", "run_local", "task_command"]

ADDRESS_TIMEOUT = 60.0


@dataclass(frozen=True, slots=True)
class TaskFiles:
    """Where a task tells its launcher something: its address, and why it failed."""

    address: Path
    outcome: Path


CommandBuilder = Callable[[TaskConfig, TaskFiles, Sequence[str]], Sequence[str]]


def task_command(config: TaskConfig, files: TaskFiles, program: Sequence[str]) -> list[str]:
    """Returns the command line of a task; what it has to know else is in its environment."""
    command = [
        *(sys.executable, "-m", "trireme", "task"),
        *("--job-name", config.role, "--task-index", str(config.index)),
        *("--tied-to", str(os.getpid()), "--outcome-file", str(files.outcome)),
    ]
    if config.role == "coordinator":
        command += ["--address-file", str(files.address)]
    return [*command, *program] if config.role == "worker" else command


@dataclass(frozen=True, slots=True)
class LocalJob:
    """One job of this host.

    Attributes:
        program: the user's program and its arguments.
        task: what all tasks have in common: job, secret, counts, options.
        limits: how long and how often.
        options: what the user asked for, by option name, for `job.json`.
        build_command: how to start a task.
        address_timeout: seconds until the coordinator must have told its address.
    """

    program: tuple[str, ...]
    task: TaskConfig
    limits: Limits = field(default_factory=Limits)
    options: Mapping[str, Any] = field(default_factory=dict)
    build_command: CommandBuilder = task_command
    address_timeout: float = ADDRESS_TIMEOUT


def run_local(job: LocalJob, directory: RunDirectory, console: Console) -> int:
    """Runs a job to its end and returns its exit status.

    SIGINT, SIGTERM or SIGHUP once: the workers save and end; twice: all end at once. To be called
    from the main thread.

    Args:
        job: what to run.
        directory: where its logs and its record go; stays claimed.
        console: where its tasks' lines go.

    Returns:
        0 finished; 1 a task failed; 2 a worker found that it was asked for something impossible;
        130 stopped by a signal, after the workers have saved and ended.
    """
    with _signals() as wakeup, selectors.DefaultSelector() as selector:
        selector.register(wakeup, selectors.EVENT_READ, None)
        launcher = _Launcher(job, directory, console, selector)
        try:
            launcher.run()
        finally:
            launcher.kill_all()
        return launcher.conclude()


class _Launcher:
    """The processes of one job, and the supervision that says what to do with them."""

    def __init__(
        self,
        job: LocalJob,
        directory: RunDirectory,
        console: Console,
        selector: selectors.BaseSelector,
    ) -> None:
        self._job = job
        self._directory = directory
        self._console = console
        self._selector = selector
        self._supervision = Supervision(job.limits)
        self._processes: dict[str, TaskProcess] = {}
        self._tails: dict[str, Sequence[str]] = {}
        self._pids: dict[str, int] = {}
        self._meetings: dict[int, str] = {}
        self._coordinator = ""
        self._started = time.time()
        self._begin = time.monotonic()

    # From start to end -----------------------------------------------------------------------

    def run(self) -> None:
        task = self._job.task
        if task.servers:
            self._start("coordinator", 0)
            self._coordinator = self._wait_for_address()
        if self._supervision.phase is Phase.RUNNING:
            for index in range(task.servers):
                self._start("ps", index)
            if task.host_aggregator:
                self._start("aggregator", 0)
            for config in self._workers():
                self._start_task(config)
            self._record("running", None)
        while self._supervision.phase is not Phase.DONE:
            self._turn(1.0)

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
            self._record("failed", status)
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

    def kill_all(self) -> None:
        """Leaves nothing behind, even if this launcher itself went wrong."""
        for process in self._processes.values():
            process.kill()

    def _record(self, state: str, status: int | None) -> None:
        job = self._job
        self._directory.write_record(
            JobRecord(
                job=job.task.job,
                state=state,
                status=status,
                host=socket.gethostname(),
                launcher=os.getpid(),
                pids=self._pids,
                coordinator=self._coordinator,
                secret_file=str(self._directory.secret_file.resolve()),
                command=job.program,
                options=dict(job.options),
                origins=job.task.origins,
                started=self._started,
                ended=None if status is None else time.time(),
            )
        )

    # Starting --------------------------------------------------------------------------------

    def _start(self, role: Role, index: int) -> None:
        self._start_task(msgspec.structs.replace(self._job.task, role=role, index=index, rank=0))

    def _start_task(self, config: TaskConfig) -> None:
        self._supervision.started(config.name)
        self._spawn(
            msgspec.structs.replace(
                config,
                coordinator=self._coordinator,
                restarts_left=self._job.limits.restarts,
            )
        )

    def _workers(self) -> list[TaskConfig]:
        """Returns the worker processes: each alone, all together, or several to a worker."""
        task = self._job.task
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

    def _spawn(self, config: TaskConfig) -> None:
        name = config.name
        files = self._files(name)
        files.outcome.unlink(missing_ok=True)
        with contextlib.ExitStack() as stack:
            config, fds = self._meeting(config, stack)
            process = TaskProcess(
                name,
                self._job.build_command(config, files, self._job.program),
                self._environ(config),
                log=self._directory.log(name),
                emit=lambda line, error: self._console.line(name, line, error),
                pass_fds=fds,
            )
        self._processes[name] = process
        self._pids[name] = process.pid
        for pipe in process.pipes:
            self._selector.register(pipe.fd, selectors.EVENT_READ, (process, pipe))

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
        return TaskFiles(stem.with_suffix(".address"), stem.with_suffix(".outcome"))

    def _environ(self, config: TaskConfig) -> dict[str, str]:
        threads, variables = thread_variables(os.environ, config.tasks)
        task = encode_task(msgspec.structs.replace(config, threads=threads))
        return {**os.environ, **variables, TASK_VARIABLE: task, "PYTHONUNBUFFERED": "1"}

    def _wait_for_address(self) -> str:
        """Waits until the coordinator has told where it listens; "" if it will not."""
        file = self._files("coordinator:0").address
        deadline = time.monotonic() + self._job.address_timeout
        while self._supervision.phase is Phase.RUNNING:
            if file.exists():
                return file.read_text(encoding="utf-8").strip()
            if time.monotonic() > deadline:
                self._console.say(
                    f"coordinator:0 did not listen within {self._job.address_timeout:.0f} s",
                    alarm=True,
                )
                self._processes["coordinator:0"].kill()
                deadline = float("inf")
            self._turn(0.01)
        return ""

    # One turn of the loop --------------------------------------------------------------------

    def _turn(self, longest: float) -> None:
        now = time.monotonic()
        deadline = self._supervision.deadline
        wait = longest if deadline is None else min(longest, max(0.0, deadline - now))
        for key, _ in self._selector.select(wait):
            if key.data is None:
                self._signalled(key.fd)
            else:
                self._read(*key.data)
        self._reap()
        self._carry_out(self._supervision.tick(time.monotonic()))

    def _signalled(self, fd: int) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in os.read(fd, 4096):
                if number != signal.SIGCHLD:
                    self._carry_out(self._supervision.interrupt(time.monotonic()))

    def _read(self, process: TaskProcess, pipe: Pipe) -> None:
        if not process.read(pipe):
            self._selector.unregister(pipe.fd)

    def _reap(self) -> None:
        for name, process in list(self._processes.items()):
            status = process.poll()
            if status is not None:
                self._ended(name, process, status)

    def _ended(self, name: str, process: TaskProcess, status: int) -> None:
        del self._processes[name]
        for pipe in process.pipes:
            with contextlib.suppress(KeyError):
                self._selector.unregister(pipe.fd)
        process.finish()
        self._tails[name] = tuple(process.last_lines)
        outcome = read_outcome(self._files(name).outcome) or describe_status(status)
        now = time.monotonic()
        self._carry_out(self._supervision.exited(now, name, status, outcome))

    def _carry_out(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Say(text):
                    self._console.say(text, alarm=text.startswith("WARNING"))
                case Terminate(name):
                    self._processes[name].terminate()
                case Kill(name):
                    self._processes[name].kill()
                case Restart(name, left):
                    self._restart(name, left)

    def _restart(self, name: str, left: int) -> None:
        config = next(config for config in self._workers() if config.name == name)
        self._spawn(
            msgspec.structs.replace(config, coordinator=self._coordinator, restarts_left=left)
        )
        self._record("running", None)


@contextlib.contextmanager
def _signals() -> Iterator[socket.socket]:
    """Turns signals into bytes on a socket while the block runs.

    SIGHUP stays ignored where it was (`nohup`). SIGINT does not: a shell script starts every
    background job with it ignored, and yet whoever sends it to a launcher wants the job to stop.
    """
    ours = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
    previous = {number: signal.getsignal(number) for number in ours}
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    with reader, writer:
        wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for number, handler in previous.items():
            if number != signal.SIGHUP or handler is not signal.SIG_IGN:
                signal.signal(number, lambda *_: None)
        try:
            yield reader
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in previous.items():
                signal.signal(number, handler)
