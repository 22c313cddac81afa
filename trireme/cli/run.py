"""`trireme run`: a job on this host, or on the nodes of a cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import msgspec

from trireme.cli.parser import RUN
from trireme.cli.tasks.coordinator import HostedCoordinator
from trireme.errors import ConfigurationError, UsageError
from trireme.job_config import COMMAND_LINE, JobConfig
from trireme.launch.config.secret import fresh_secret, read_secret
from trireme.launch.config.sources import read_config, read_file
from trireme.launch.config.task_config import (
    TASK_VARIABLE,
    GroupMember,
    TaskConfig,
    encode_task,
    fresh_job,
)
from trireme.launch.engines import ENGINES, all_options, check_engine
from trireme.launch.launcher import Job
from trireme.launch.output import Console, background_console
from trireme.launch.process_setup.program import check_program, program_name, run_program
from trireme.launch.process_setup.resources import (
    allow_many_descriptors,
    thread_variables,
    threads_of_task,
)
from trireme.launch.program_directory import unlink_name
from trireme.launch.run_directory import claim, claim_free
from trireme.launch.supervision_state import SupervisionLimits
from trireme.location import RemotePath, local_directory, location, open_store
from trireme.monitor.recording import records_directory
from trireme.strategies import choose
from trireme.wire.transport import check_transport

CONNECT_TIMEOUT = 30.0
"""The coordinator listens before any other task starts. A task that cannot reach it need not wait
for long."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns the job's exit status."""
    parser = RUN.parser()
    options, program = parser.split(arguments)
    given = parser.parse_args(options)
    task = prepare(configuration(vars(given), given.config))
    if not program:
        raise UsageError("name the program to run: trireme run [OPTIONS] SCRIPT [ARGS...]")
    check_program(program)
    if given.dry_run:
        return _dry_run(task, program)
    allow_many_descriptors()
    with background_console() as console:
        return start(task, program, program_name(program), console)


def configuration(
    given: Mapping[str, str | None], file: str | None, given_by: str = COMMAND_LINE
) -> JobConfig:
    """Returns the configuration of a job that starts here; `given` has the text of each option."""
    return read_config(given, os.environ, read_file(file), given_by=given_by)


def prepare(config: JobConfig) -> TaskConfig:
    """Checks the configuration of a job; returns what all its tasks have in common."""
    check_engine(config)
    check_transport(config.network.transport, config.origin("transport"))
    config = _sized(config)
    task = _task(config)
    config.check_together(task.servers)
    choose(config, workers=task.workers, servers=task.servers)
    return task


def _sized(config: JobConfig) -> JobConfig:
    if config.tasks.workers != "auto":
        return config
    gpus = _visible_gpus()
    found = f"{gpus} GPUs here" if gpus != 1 else "1 GPU here"
    return config.replaced(
        f"{config.origin('workers')}: auto, {found}", workers=max(1, gpus // config.inside)
    )


def _visible_gpus() -> int:
    import torch  # takes seconds, and only `--workers auto` needs it

    return torch.cuda.device_count()


def _task(config: JobConfig) -> TaskConfig:
    assert config.tasks.workers != "auto"
    together = 1 if config.tasks.ps else config.tasks.workers
    return TaskConfig(
        job=fresh_job(),
        # Without servers every process is a worker.
        workers=config.tasks.workers * (1 if config.tasks.ps else config.inside),
        servers=config.tasks.ps,
        group=GroupMember(size=config.inside * together),
        config=config,
        display="plain",
        connect_timeout=min(config.timeouts.join_timeout, CONNECT_TIMEOUT),
    )


def _dry_run(task: TaskConfig, program: Sequence[str]) -> int:
    """Prints the configuration, then runs the program, whose session prints the rest and ends."""
    for line in task.config.lines(all_options()):
        print(line)
    sys.stdout.flush()
    threads = threads_of_task(os.environ, task.tasks)
    dry = msgspec.structs.replace(task, dry_run=True, threads=threads)
    os.environ.update(thread_variables(os.environ, threads))
    os.environ[TASK_VARIABLE] = encode_task(dry)
    return run_program(program)


def start(
    task: TaskConfig,
    program: Sequence[str],
    name: str,
    console: Console,
    watch: Callable[[Path], AbstractContextManager[object]] = nullcontext,
) -> int:
    """Runs a job to its end and returns its exit status. Call it from the main thread.

    `watch` shows the job in a run directory while the context that it returns lasts.
    """
    config = task.config
    engine, run = ENGINES.load(config.launch.on), ENGINES.imported(config.launch.on, "run")
    if config.output.run_dir is not None:
        _check_remote(config.output.run_dir)
        directory = claim(local_directory(config.output.run_dir))
    else:
        unlink_name(Path("runs") / name)
        directory = claim_free(Path("runs") / name)
    try:
        directory.write_secret(fresh_secret())
        if engine.one_host:  # other hosts may not have the directory
            records = records_directory(directory.path.resolve())
            task = msgspec.structs.replace(task, records=str(records))
        job = Job(
            program=tuple(program),
            task=msgspec.structs.replace(task, secret=read_secret(directory.secret_file)),
            limits=SupervisionLimits(
                restarts=config.launch.max_restarts,
                # Without copies a job that loses a server has lost values.
                outlives_servers=config.tasks.replicas > 1,
                coordinated=task.servers > 0,
                together=task.group.size > 1,
            ),
            coordinate=partial(HostedCoordinator, console) if task.servers else None,
        )
        with watch(directory.path):
            status: int = run(job, directory, console)
            return status
    finally:
        directory.release()


def _check_remote(run_dir: str) -> None:
    where = location(run_dir)
    if isinstance(where, RemotePath) and not open_store(where)[0].shared:
        raise ConfigurationError(
            f"--run-dir {run_dir}: checkpoints there are in the memory of one process and "
            "are lost when it ends. Name a directory or an object store"
        )
