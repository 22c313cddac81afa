"""`trireme task`: one task of a job in this process, started by hand or by `trireme run`."""

from __future__ import annotations

import argparse
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

from trireme.cli.parser import TASK
from trireme.cli.tasks.coordinator import ServedCoordinator, policy_of, serve_metrics
from trireme.cluster.spec import ClusterTask
from trireme.errors import JobFailed, TriremeError, UsageError
from trireme.files import write_atomically
from trireme.launch.by_hand import classic_strategy, classic_task, manual_task
from trireme.launch.config.secret import SECRET_VARIABLE, secret_descriptor
from trireme.launch.config.sources import read_config, read_file
from trireme.launch.config.task_config import TASK_VARIABLE, TaskConfig, encode_task
from trireme.launch.engines import task_options
from trireme.launch.environment import detect, find_launched
from trireme.launch.exit_reason import INTERRUPTED, LEFT, LauncherPipe, describe
from trireme.launch.process_setup.orphans import end_with_parent
from trireme.launch.process_setup.program import run_program
from trireme.launch.process_setup.resources import (
    allow_many_descriptors,
    keep_freed_memory,
    return_freed_memory,
    take_turns,
    thread_variables,
)
from trireme.monitor.background_writer import BackgroundHandler, BackgroundWriter, DroppedWrites
from trireme.printable import printable
from trireme.strategies import choose
from trireme.wire.transport import check_transport

if TYPE_CHECKING:
    from trireme.cluster.journal import Journal
    from trireme.cluster.messages import JobOver


@dataclass(frozen=True, slots=True)
class _Audience:
    """Whom a task tells what it does."""

    name: str = ""  # the prefix of each line: the task's name, unless the launcher adds it
    address_file: Path | None = None  # takes the address at which it listens
    journal: Path | None = None  # keeps what its coordinator knows, which it goes on with
    launcher: LauncherPipe | None = None  # none for a task that was started by hand

    def say(self, text: str) -> None:
        print(f"{self.name}{text}", flush=True)


def main(arguments: Sequence[str]) -> int:
    """Runs the task and returns its exit status."""
    parser = TASK.parser()
    options, program = parser.split(arguments)
    given = parser.parse_args(options)
    keep_freed_memory(os.environ)
    if given.tied_to is not None:
        end_with_parent(int(given.tied_to))
        task = detect(os.environ)
        if task.config.model.memory_limit is not None:
            return_freed_memory(os.environ)
        fd = task.descriptors.get("launcher")
        launcher = None if fd is None else LauncherPipe(fd)
        return _run(task, program, _Audience(launcher=launcher))
    return _by_hand(given, program)


def _by_hand(given: argparse.Namespace, program: Sequence[str]) -> int:
    given.strategy = classic_strategy(vars(given))
    config = read_config(vars(given), os.environ, read_file(given.config), task_options())
    named = _launched_task(given) or classic_task(vars(given))
    task = manual_task(named, config, os.environ, given.secret_file)
    choose(task.config, workers=task.workers, servers=task.servers)
    check_transport(config.network.transport, config.origin("transport"))
    if given.journal is not None and not task.hosts_coordinator:
        raise UsageError(
            f"--journal is for the task with the coordinator, and {task.name} has none: leave "
            "it out here"
        )
    journal = None if given.journal is None else given.journal.resolve()
    audience = _Audience(f"{task.name} ", given.address_file, journal)
    with secret_descriptor(task) as inherited:
        # Before the program imports PyTorch. Processes that it starts inherit all of it, but
        # neither the secret nor the key.
        if task.threads is not None:
            os.environ.update(thread_variables(os.environ, task.threads))
        os.environ.pop(SECRET_VARIABLE, None)
        os.environ[TASK_VARIABLE] = encode_task(inherited)
        return _run(task, program, audience)


def _run(task: TaskConfig, program: Sequence[str], audience: _Audience) -> int:
    if task.config.training.strategy == "sync" or (task.group.size > 1 and not task.servers):
        take_turns()
    if os.getpid() == 1:  # the first process of a container: the kernel drops what it does not take
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(LEFT))
    if task.role == "worker":
        if not program:
            raise UsageError(f"{task.name} needs a program: add SCRIPT [ARGS...] at the end")
        name = audience.name.strip()
        return run_program(program, task=name, launcher=audience.launcher)
    allow_many_descriptors()
    with BackgroundWriter("terminal") as terminal:  # its loop waits for no terminal
        handler = BackgroundHandler(terminal, sys.stderr)
        handler.setFormatter(_LineFormatter(f"{audience.name}%(message)s"))
        logging.basicConfig(level=logging.WARNING, handlers=[handler])
        return _serve(task, audience, terminal)


def _serve(task: TaskConfig, audience: _Audience, terminal: BackgroundWriter) -> int:
    """Serves a task that is no worker to its end; returns its exit status."""
    try:
        if task.role == "coordinator":
            over = _serve_coordinator(task, audience)
        else:
            over = _serve_parameters(task, audience, terminal)
    except TriremeError as error:
        if audience.launcher is not None:
            audience.launcher.send(describe(error))
        raise
    how = "stopped" if over is None else f"the job is {over.outcome}"
    failed = over is not None and over.outcome == "failed"
    if over is not None and failed:
        how = f"the job failed: {over.culprit}: {over.reason}"
        if audience.launcher is not None:
            audience.launcher.send(describe(JobFailed(how)))
            how = "the job failed"  # the launcher reports why
    terminal.put(lambda: audience.say(f"ends: {printable(how)}"))
    if task.role == "coordinator" and over is not None and over.outcome == "interrupted":
        return INTERRUPTED  # a program whose loop is its own ends with a status of its own
    return 1 if failed else 0


class _LineFormatter(logging.Formatter):
    """Writes the message of a record as one line: it may quote a peer, or a file's name."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))


def _launched_task(given: argparse.Namespace) -> ClusterTask | None:
    """Returns the task that the environment names, where no flag does."""
    if (given.job_name, given.task_index, given.ps_hosts, given.worker_hosts) != (None,) * 4:
        return None
    launched = find_launched(os.environ)
    if launched is None:
        return None
    if isinstance(launched.task, ClusterTask):
        return launched.task
    raise UsageError(
        f"{launched.by} names no parameter server, so every task is the program itself: start it "
        "by `python SCRIPT`, or name the servers too"
    )


_MOST_RECORDS = 100
"""How many records of a server may wait for its disk: those of 50 s."""


def _journal(path: Path | None) -> Journal | None:
    """Returns the journal of a task's coordinator; None where it keeps none.

    A job that has ended begins anew with the same command.
    """
    from trireme.cluster.journal import Journal

    if path is None:
        return None
    journal = Journal(path)
    if journal.state is not None and journal.state.over is not None:
        journal.state = None
    return journal


def _serve_coordinator(task: TaskConfig, audience: _Audience) -> JobOver | None:
    """Serves the coordinator alone until the job is over and every task was informed."""
    journal = _journal(audience.journal)
    served = ServedCoordinator(task, journal=journal)
    _write_address(audience, served.address)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(
            number,
            lambda number, _: served.stop_job(
                f"{signal.Signals(number).name} to {task.name}", final=False
            ),
        )
    served.run(audience.say)
    if journal is not None:
        journal.close()
    return served.state.over


def _serve_parameters(
    task: TaskConfig, audience: _Audience, terminal: BackgroundWriter
) -> JobOver | None:
    from trireme.ps.server.metrics import ShardMetrics
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
        journal=_journal(audience.journal) if task.hosts_coordinator else None,
        host=task.host,
    )

    metrics = ShardMetrics(server.index)
    with (
        BackgroundWriter("records", _MOST_RECORDS) as records,
        serve_metrics(task, (metrics, DroppedWrites((terminal, records))), audience.say),
    ):
        write = _recorder(task)

        def record(status: Mapping[str, float | str], last: bool) -> None:
            records.put(partial(write, time.time(), dict(status), last))

        return serve(
            server,
            on_listening=lambda address: _write_address(audience, address),
            metrics=metrics,
            record=record,
        )


def _recorder(task: TaskConfig) -> Callable[[float, dict[str, float | str], bool], None]:
    """Returns the function that writes a server's reports to its records, if it has records."""
    if task.records is None:
        return lambda now, status, last: None
    from trireme.monitor.records import Record, RecordWriter, begin_here

    writer = RecordWriter(Path(task.records), begin_here(task.name, task.job, None))

    def record(now: float, status: dict[str, float | str], last: bool) -> None:
        writer.write(Record(time=now, status=status), due=last)

    return record


def _write_address(audience: _Audience, address: str) -> None:
    if audience.address_file is not None:
        try:
            write_atomically(audience.address_file, f"{address}\n".encode())
        except OSError as error:
            raise UsageError(
                f"--address-file: {audience.address_file} cannot be written: {error.strerror}"
            ) from error
    audience.say(f"listens on {address}")
