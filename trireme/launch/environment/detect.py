"""Reads from the environment which task this process is.

`TRIREME_TASK` describes the task completely. Without it, the variables of another launcher do:
torchrun's, `TF_CONFIG`, MPI's or Slurm's. Without any of them this process is a job of its own,
with one worker and no server.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from trireme.cluster.spec import ClusterTask
from trireme.errors import ConfigurationError
from trireme.job_config import OPTIONS, TASK_OPTIONS, JobConfig, Option
from trireme.launch.config.consistency import check_together
from trireme.launch.config.secret import receive_secret
from trireme.launch.config.sources import read_config, read_file
from trireme.launch.config.task_config import (
    TASK_VARIABLE,
    Role,
    TaskConfig,
    decode_task,
    encode_task,
    fresh_job,
)
from trireme.launch.environment.manual import manual_task
from trireme.launch.environment.process_launchers import (
    TORCHRUN,
    LaunchedProcess,
    find_launched_process,
)
from trireme.launch.environment.tf_config import (
    TF_VARIABLE,
    read_tf_config,
    tf_launched_process,
)
from trireme.launch.process_setup.threads import thread_variables

__all__ = [
    "TASK_VARIABLE",
    "Role",
    "TaskConfig",
    "detect",
    "encode_task",
    "fresh_job",
]

_log = logging.getLogger(__name__)


def detect(environ: Mapping[str, str] | None = None, directory: Path | None = None) -> TaskConfig:
    """Returns the task that this process is.

    Args:
        environ: the environment; this process's own by default.
        directory: the directory of the configuration file, which is read where another launcher
            started this process; the working directory by default.

    Raises:
        ConfigurationError: the environment describes no task, or one that cannot be.
        UsageError: an option in the environment or the file is wrong.
    """
    environ = os.environ if environ is None else environ
    if TASK_VARIABLE in environ:
        task = decode_task(environ[TASK_VARIABLE])
        if task.secret_fd is None:
            return task
        return msgspec.structs.replace(task, secret=receive_secret(task.secret_fd, task.job))
    process = find_launched_process(environ, TORCHRUN)
    tf = read_tf_config(environ[TF_VARIABLE]) if environ.get(TF_VARIABLE, "").strip() else None
    if process is None and tf is not None:
        if tf.cluster.ps:
            return _server_task(tf, _read(environ, directory, TASK_OPTIONS), environ)
        process = tf_launched_process(tf)
    process = process or find_launched_process(environ)
    if process is None:
        _warn_of_variables(environ)
        return TaskConfig(job=fresh_job())
    return _process_group_task(process, _read(environ, directory, OPTIONS), environ)


def _warn_of_variables(environ: Mapping[str, str]) -> None:
    """Warns of launch options in the environment of a program that no launcher started."""
    read_config({}, environ, None)  # refuses misspelt variables
    without_effect = [o.variable for o in OPTIONS if environ.get(o.variable, "") != ""]
    if without_effect:
        _log.warning(
            "%s: options of a launch, which a program that is started by python alone does not "
            "have; start it with `trireme run`",
            ", ".join(without_effect),
        )


def _read(
    environ: Mapping[str, str], directory: Path | None, options: Sequence[Option]
) -> JobConfig:
    file = read_file(None, Path.cwd() if directory is None else directory)
    return read_config({}, environ, file, options)


def _process_group_task(
    process: LaunchedProcess, config: JobConfig, environ: Mapping[str, str]
) -> TaskConfig:
    """Returns the task of one process of a group that holds a model together."""
    if config.ps:
        raise ConfigurationError(
            f"ps is {config.ps} ({config.origin('ps')}), and {process.launcher} starts "
            "workers alone: start a job with parameter servers by `trireme run` or `trireme task`, "
            "or leave ps out"
        )
    config = config.replaced(process.launcher, workers=process.size)
    check_together(config, 0)
    sharing, cores = (1, process.cores) if process.cores else (process.local_size, None)
    threads, _ = thread_variables(environ, sharing, cores)
    return TaskConfig(
        job=process.job or fresh_job(),
        index=process.rank,
        workers=process.size,
        processes=process.size,
        rank=process.rank,
        local_rank=process.local_rank,
        one_host=process.local_size == process.size,
        process_group=process.address,
        process_group_prefix=process.prefix,
        config=config,
        # All processes write to one terminal or file, without their names before the lines.
        display="none" if process.rank else "auto",
        threads=threads if process.size > 1 else None,
    )


def _server_task(tf: ClusterTask, config: JobConfig, environ: Mapping[str, str]) -> TaskConfig:
    """Returns a task of a cluster with parameter servers, as if it was started by hand."""
    manual = manual_task(tf, config, environ)
    check_together(config, manual.task.servers)
    threads, _ = thread_variables(environ, manual.neighbours)
    return msgspec.structs.replace(manual.task, threads=threads)
