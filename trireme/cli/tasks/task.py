"""One task of a job in this process, for its launcher: `trireme --task NAME PID [PROGRAM...]`."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trireme.cli.tasks.coordinator import policy_of, serve_metrics
from trireme.errors import JobFailed, TriremeError, UsageError
from trireme.launch.background_writer import BackgroundHandler, BackgroundWriter
from trireme.launch.config.task_config import TaskConfig
from trireme.launch.environment import detect
from trireme.launch.exit_reason import INTERRUPTED, LEFT, LauncherPipe, describe
from trireme.launch.process_setup.orphans import end_with_parent
from trireme.launch.process_setup.program import run_program
from trireme.launch.process_setup.resources import (
    allow_many_descriptors,
    keep_freed_memory,
    take_turns,
)
from trireme.monitor.recording import recording_of
from trireme.printable import printable

if TYPE_CHECKING:
    from trireme.cluster.coordinator import Journal
    from trireme.cluster.messages import JobOver

_MOST_RECORDS = 100  # how many records of a server may wait for its disk: those of 50 s


@dataclass(frozen=True, slots=True)
class Start:
    """How a task was started: by its launcher, or by hand."""

    launcher: LauncherPipe | None = None
    prefix: str = ""  # of each line, where no launcher adds the task's name
    listening: Callable[[str], object] = lambda address: None  # takes the address where it listens
    journal: Journal | None = None  # of the coordinator, where the task hosts it

    def say(self, text: str) -> None:
        print(f"{self.prefix}{text}", flush=True)

    def listens(self, address: str) -> None:
        """Makes known where the task listens."""
        self.listening(address)
        self.say(f"listens on {address}")


def main(arguments: Sequence[str]) -> int:
    """Runs a task for its launcher, and returns its exit status."""
    _, parent, *program = arguments  # first its name, for lists of processes
    keep_freed_memory(os.environ)
    end_with_parent(int(parent))
    task = detect(os.environ)
    if task.config.model.memory_limit is not None:
        keep_freed_memory(os.environ, limited=True)
    return run_task(task, program, Start(LauncherPipe(task.descriptors["launcher"])))


Serve = Callable[[TaskConfig, Start], "JobOver | None"]  # serves what is no worker to its end


def run_task(
    task: TaskConfig, program: Sequence[str], start: Start, serve: Serve | None = None
) -> int:
    """Runs a task and returns its exit status; `serve` serves one that is no parameter server."""
    if task.config.training.strategy == "sync" or (task.group.size > 1 and not task.servers):
        take_turns()
    if os.getpid() == 1:  # the first process of a container: the kernel drops what it does not take
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(LEFT))
    if task.role == "worker":
        if not program:
            raise UsageError(f"{task.name} needs a program: add SCRIPT [ARGS...] at the end")
        return run_program(program, task=start.prefix.strip(), launcher=start.launcher)
    allow_many_descriptors()
    with BackgroundWriter("terminal") as terminal:  # its loop waits for no terminal
        handler = BackgroundHandler(terminal, sys.stderr)
        handler.setFormatter(_LineFormatter(f"{start.prefix}%(message)s"))
        logging.basicConfig(level=logging.WARNING, handlers=[handler])
        return _serve(task, start, terminal, serve or serve_parameters)


def _serve(task: TaskConfig, start: Start, terminal: BackgroundWriter, serve: Serve) -> int:
    try:
        over = serve(task, start)
    except TriremeError as error:
        if start.launcher is not None:
            start.launcher.send(describe(error))
        raise
    how = "stopped" if over is None else f"the job is {over.outcome}"
    failed = over is not None and over.outcome == "failed"
    if over is not None and failed:
        how = f"the job failed: {over.culprit}: {over.reason}"
        if start.launcher is not None:
            start.launcher.send(describe(JobFailed(how)))
            how = "the job failed"  # the launcher reports why
    terminal.put(lambda: start.say(f"ends: {printable(how)}"))
    if task.role == "coordinator" and over is not None and over.outcome == "interrupted":
        return INTERRUPTED  # a program whose loop is its own ends with a status of its own
    return 1 if failed else 0


class _LineFormatter(logging.Formatter):
    """Writes the message of a record as one line: it may quote a peer, or a file's name."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))


def serve_parameters(task: TaskConfig, start: Start) -> JobOver | None:
    """Serves a parameter server until the job is over."""
    from trireme.ps.server.measures import measures_of
    from trireme.ps.server.service import ServerConfig, serve

    server = ServerConfig(
        job=task.job,
        secret=bytes.fromhex(task.secret),
        index=task.index,
        listen=task.listen,
        coordinator=None if task.hosts_coordinator else task.coordinator,
        policy=policy_of(task),
        config=task.config,
        certificates=task.own_certificates,
        journal=start.journal,
        host=task.host,
    )
    measures = measures_of(server.index)
    with BackgroundWriter("records", _MOST_RECORDS) as records:
        write = _recorder(task)

        def record(status: Mapping[str, float | str], last: bool) -> None:
            records.put(partial(write, time.time(), dict(status), last))

        with serve_metrics(task, (lambda: measures.numbers,), start.say):
            return serve(server, on_listening=start.listens, measures=measures, record=record)


def _recorder(task: TaskConfig) -> Callable[[float, dict[str, float | str], bool], None]:
    """Returns the function that writes a server's reports to its records, if it has records."""
    if task.records is None:
        return lambda now, status, last: None
    recording = recording_of(Path(task.records), task.name, task.job)
    return lambda now, status, last: recording.write(now, status, {}, last=last)
