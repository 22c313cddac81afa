"""Where am I: reads the environment, gives the task that this process is.

`TRIREME_TASK` says all of it. Without that, another launcher's variables do: torchrun's, those of
`TF_CONFIG`, MPI's or Slurm's. Without any, this process is a job of its own: one worker, no server.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from trireme.errors import ConfigurationError
from trireme.launch.manual import ManualOptions, manual_task
from trireme.launch.others import TORCHRUN, Place, find_place
from trireme.launch.secret import taken_over
from trireme.launch.settings import (
    OPTIONS,
    Settings,
    check_mesh,
    check_together,
    read_file,
    resolve,
)
from trireme.launch.task_config import (
    TASK_VARIABLE,
    Role,
    TaskConfig,
    decode_task,
    encode_task,
    fresh_job,
)
from trireme.launch.tf_config import TF_VARIABLE, TfTask, read_tf_config, tf_place
from trireme.launch.threads import thread_variables

__all__ = [
    "PLAINTEXT_VARIABLE",
    "TASK_VARIABLE",
    "Role",
    "TaskConfig",
    "detect",
    "encode_task",
    "fresh_job",
    "tf_options",
]

_log = logging.getLogger(__name__)

PLAINTEXT_VARIABLE = "TRIREME_ALLOW_PLAINTEXT"


def detect(environ: Mapping[str, str] | None = None, directory: Path | None = None) -> TaskConfig:
    """Returns the task that this process is.

    Args:
        environ: the environment; this process's own by default.
        directory: where the configuration file is, which counts where another launcher started
            this process; the working directory by default.

    Raises:
        ConfigurationError: the environment does not describe a task, or not one that can be.
        UsageError: an option in the environment or the file is wrong.
    """
    environ = os.environ if environ is None else environ
    if TASK_VARIABLE in environ:
        task = decode_task(environ[TASK_VARIABLE])
        if task.secret_fd is None:
            return task
        return msgspec.structs.replace(task, secret=taken_over(task.secret_fd, task.job))
    place = find_place(environ, TORCHRUN)
    tf = read_tf_config(environ[TF_VARIABLE]) if environ.get(TF_VARIABLE, "").strip() else None
    if place is None and tf is not None:
        if tf.ps:
            return _server_task(tf, _settings(environ, directory), environ)
        place = tf_place(tf)
    place = place or find_place(environ)
    if place is None:
        _warn_of_variables(environ)
        return TaskConfig(job=fresh_job())
    return _gang_task(place, _settings(environ, directory), environ)


def _warn_of_variables(environ: Mapping[str, str]) -> None:
    """Says which options of a launch are in the environment of a program that nobody launched."""
    resolve({}, environ, None)  # refuses what is misspelt
    without_effect = [o.variable for o in OPTIONS if environ.get(o.variable, "") != ""]
    if without_effect:
        _log.warning(
            "%s: options of a launch, which a program that is started by python alone does not "
            "have; start it with `trireme run`",
            ", ".join(without_effect),
        )


def _settings(environ: Mapping[str, str], directory: Path | None) -> Settings:
    return resolve({}, environ, read_file(None, Path.cwd() if directory is None else directory))


def _gang_task(place: Place, settings: Settings, environ: Mapping[str, str]) -> TaskConfig:
    """Returns one of the processes that hold a model together; one alone holds it all."""
    if settings["ps"]:
        raise ConfigurationError(
            f"ps is {settings['ps']} ({settings.origins['ps']}), and {place.launcher} starts "
            "workers alone: start a job with parameter servers by `trireme run` or `trireme task`, "
            "or leave ps out"
        )
    settings = settings.replaced("workers", place.size, place.launcher)
    check_together(settings, place.size, 0)
    check_mesh(settings)
    sharing, cores = (1, place.cores) if place.cores else (place.local_size, None)
    threads, _ = thread_variables(environ, sharing, cores)
    return TaskConfig(
        job=place.job or fresh_job(),
        index=place.rank,
        workers=place.size,
        processes=place.size,
        rank=place.rank,
        local_rank=place.local_rank,
        one_host=place.local_size == place.size,
        gang=place.address,
        gang_prefix=place.prefix,
        run_dir=settings["run-dir"],
        strategy=settings["strategy"],
        prefetch=settings["prefetch"],
        mesh=settings["mesh"],
        schedule=settings["schedule"],
        microbatches=settings["microbatches"],
        join_timeout=settings["join-timeout"],
        progress_timeout=settings["progress-timeout"],
        # All of them write to one terminal or file, and nobody names the lines.
        display="none" if place.rank else "auto",
        threads=threads if place.size > 1 else None,
        origins=settings.origins,
    )


def _server_task(tf: TfTask, settings: Settings, environ: Mapping[str, str]) -> TaskConfig:
    """Returns a task of a cluster with parameter servers, as if it were started by hand."""
    task = manual_task(tf_options(tf, environ), settings, environ)
    check_together(settings, len(tf.workers), len(tf.ps))
    threads, _ = thread_variables(environ, task.neighbours)
    return msgspec.structs.replace(task.config, threads=threads)


def tf_options(tf: TfTask, environ: Mapping[str, str]) -> ManualOptions:
    """Returns the classic flags of a task of `TF_CONFIG`; `ps:0` hosts the coordinator."""
    return ManualOptions(
        role=tf.role,
        index=tf.index,
        ps_hosts=",".join(tf.ps),
        worker_hosts=",".join(tf.workers),
        allow_plaintext=environ.get(PLAINTEXT_VARIABLE, "").lower() in ("1", "true", "yes"),
    )
