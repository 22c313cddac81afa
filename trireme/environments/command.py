"""`trireme task`: one task of a job, started by hand on its machine."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trireme.cli.tasks.coordinator import ServedCoordinator
from trireme.cli.tasks.task import Start, run_task
from trireme.environments.by_hand import classic_strategy, classic_task, manual_task, task_options
from trireme.environments.cluster import ClusterTask
from trireme.environments.entry import TASK, find_launched
from trireme.errors import UsageError
from trireme.files import write_atomically
from trireme.launch.config.secret import SECRET_VARIABLE, secret_descriptor
from trireme.launch.config.sources import read_config, read_file
from trireme.launch.config.task_config import TASK_VARIABLE, TaskConfig, encode_task
from trireme.launch.process_setup.resources import keep_freed_memory, thread_variables
from trireme.strategies import choose
from trireme.wire.transport import check_transport

if TYPE_CHECKING:
    from trireme.cluster.messages import JobOver
    from trireme.environments.journal import FileJournal


def main(arguments: Sequence[str]) -> int:
    """Runs the task and returns its exit status."""
    parser = TASK.parser()
    options, program = parser.split(arguments)
    given = parser.parse_args(options)
    keep_freed_memory(os.environ)
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

    with ExitStack() as stack:
        inherited = stack.enter_context(secret_descriptor(task))
        journal = given.journal and stack.enter_context(closing(_open_journal(given.journal)))
        # Before the program imports PyTorch. Processes that it starts inherit all of it, but
        # neither the secret nor the key.
        if task.threads is not None:
            os.environ.update(thread_variables(os.environ, task.threads))
        os.environ.pop(SECRET_VARIABLE, None)
        os.environ[TASK_VARIABLE] = encode_task(inherited)
        listens = partial(_write_address, given.address_file)
        start = Start(None, f"{task.name} ", listens, journal)
        return run_task(task, program, start, _serve if task.role == "coordinator" else None)


def _launched_task(given: argparse.Namespace) -> ClusterTask | None:
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


def _open_journal(path: Path) -> FileJournal:
    """Returns the journal of a coordinator. After the job's end the same command begins it anew."""
    from trireme.environments.journal import FileJournal

    journal = FileJournal(path.resolve())
    if journal.state is not None and journal.state.over is not None:
        journal.state = None
    return journal


def _serve(task: TaskConfig, start: Start) -> JobOver | None:
    served = ServedCoordinator(task, journal=start.journal)
    start.listens(served.address)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(
            number,
            lambda number, _: served.stop_job(
                f"{signal.Signals(number).name} to {task.name}", final=False
            ),
        )
    served.run(start.say)
    return served.state.over


def _write_address(file: Path | None, address: str) -> None:
    try:
        if file is not None:
            write_atomically(file, f"{address}\n".encode())
    except OSError as error:
        raise UsageError(f"--address-file: {file} cannot be written: {error.strerror}") from error
