"""Starts the tasks of a job as processes of this host, and returns when all have ended.

No process started here outlives `run_local`. If the launcher itself is killed, the kernel kills
its tasks (see `parent_death_signal.py`), and a reaper kills what they have started (see
`orphan_reaper.py`). Single-threaded: the kernel ties a child's life to the thread that started it.
"""

from __future__ import annotations

import contextlib
import os
import selectors

import msgspec

from trireme.launch.command import CommandBuilder, TaskFiles, inherited, task_command
from trireme.launch.config.secret import SECRET_VARIABLE
from trireme.launch.config.task_config import TASK_VARIABLE, TaskConfig, encode_task
from trireme.launch.console import Console
from trireme.launch.exit_reason import describe_status, read_exit_reason
from trireme.launch.launcher import (
    Event,
    Job,
    Launcher,
    MembershipReported,
    StopSignalled,
    TaskEnded,
)
from trireme.launch.membership_report import MembershipReportReader
from trireme.launch.process import Pipe, TaskProcess
from trireme.launch.process_setup.orphan_reaper import OrphanReaper
from trireme.launch.process_setup.signals import requests_to_stop, signals
from trireme.launch.process_setup.threads import thread_variables
from trireme.launch.run_directory import RunDirectory

__all__ = ["run_local"]


def run_local(
    job: Job,
    directory: RunDirectory,
    console: Console,
    build_command: CommandBuilder = task_command,
) -> int:
    """Runs a job to its end and returns its exit status.

    At the first SIGINT, SIGTERM or SIGHUP the workers save and end; at the second, all tasks end
    at once. Call it from the main thread.

    Args:
        job: what to run.
        directory: where its logs and its record go. It stays claimed.
        console: where the lines of its tasks go.
        build_command: returns the command line of a task.

    Returns:
        0 if the job finished; 1 if a task failed; 2 if a worker was asked for something
        impossible; 130 if a signal stopped the job and the workers have saved.
    """
    with signals() as wakeup, selectors.DefaultSelector() as selector, OrphanReaper() as reaper:
        selector.register(wakeup, selectors.EVENT_READ, None)
        engine = _LocalEngine(job, directory, console, selector, build_command, reaper)
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
        reaper: OrphanReaper,
    ) -> None:
        self.pids: dict[str, int] = {}
        self.nodes: dict[str, str] = {}
        self._job = job
        self._directory = directory
        self._console = console
        self._selector = selector
        self._build_command = build_command
        self._reaper = reaper
        self._processes: dict[str, TaskProcess] = {}
        self._process_group_addresses: dict[int, str] = {}
        self._coordinator = ""
        self._membership_report = MembershipReportReader(
            self._files("coordinator:0").membership_report
        )

    @property
    def coordinator(self) -> str:
        file = self._files("coordinator:0").address
        if not self._coordinator and file.exists():
            self._coordinator = file.read_text(encoding="utf-8").strip()
        return self._coordinator

    def start(self, config: TaskConfig) -> None:
        name = config.name
        files = self._files(name)
        for file in (files.exit_reason, files.address, files.membership_report):
            file.unlink(missing_ok=True)
        if config.role == "coordinator":
            self._coordinator = ""
        if config.group is not None and config.rank:  # rank 0 was started first
            address = self._process_group_addresses[config.group]
            config = msgspec.structs.replace(config, process_group=address)
        with inherited(config) as (config, fds):
            process = TaskProcess(
                name,
                self._build_command(config, files, self._job.program),
                self._environ(config),
                log=self._directory.log(name),
                emit=lambda line, error: self._console.line(name, line, error),
                warn=lambda text: self._console.say(text, alarm=True),
                pass_fds=fds,
            )
        if config.group is not None:
            self._process_group_addresses[config.group] = config.process_group
        self._processes[name] = process
        self.pids[name] = process.pid
        for pipe in process.pipes:
            self._selector.register(pipe.fd, selectors.EVENT_READ, (process, pipe))

    def terminate(self, name: str) -> None:
        if name in self._processes:  # else its end was reported already
            self._processes[name].terminate()

    def kill(self, name: str) -> None:
        if name in self._processes:
            self._processes[name].kill()

    def used(self, name: str) -> float:
        return self._processes[name].used() if name in self._processes else 0.0

    def kill_all(self) -> None:
        """Kills every task that lives, even if this launcher itself failed."""
        for process in self._processes.values():
            process.kill()

    def wait(self, seconds: float) -> list[Event]:
        events: list[Event] = []
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                events += [StopSignalled()] * requests_to_stop(key.fd)
            else:
                self._read(*key.data)
        ended = self._reap()
        membership_report = self._membership_report.news()
        if membership_report is not None:
            events.append(MembershipReported(membership_report))
        return events + ended

    def _files(self, name: str) -> TaskFiles:
        # A program may change its working directory before it fails.
        stem = self._directory.scratch.resolve() / name.replace(":", "-").replace("/", "-")
        return TaskFiles(
            stem.with_suffix(".address"),
            stem.with_suffix(".reason"),
            stem.with_suffix(".members"),
        )

    def _environ(self, config: TaskConfig) -> dict[str, str]:
        threads, variables = thread_variables(os.environ, config.tasks)
        task = encode_task(msgspec.structs.replace(config, threads=threads))
        set_here = {TASK_VARIABLE: task, "PYTHONUNBUFFERED": "1", **self._reaper.variables}
        own = {name: value for name, value in os.environ.items() if name != SECRET_VARIABLE}
        return {**own, **variables, **set_here}

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
        reason = read_exit_reason(self._files(name).exit_reason) or describe_status(status)
        return TaskEnded(name, status, reason, tuple(process.last_lines))
