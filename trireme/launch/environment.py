"""Reads from the environment which task this process is.

`TRIREME_TASK` describes the task completely. Without it, what another launcher left does: torchrun,
Slurm, `TF_CONFIG` and others, each of which is an entry point. Without any of them this process is
a job of its own, with one worker and no server.

`trireme` reports the failures of the processes that it starts. A process of another launcher
reports its own failure, in one line, because many processes write to one terminal.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType

import msgspec

from trireme.cluster.spec import LOOPBACK, ClusterSpec, ClusterTask, is_loopback
from trireme.errors import ConfigurationError, TriremeError, UsageError
from trireme.job_config import JobConfig
from trireme.launch.by_hand import manual_task
from trireme.launch.config.secret import receive_secret
from trireme.launch.config.sources import read_config, read_file
from trireme.launch.config.task_config import TASK_VARIABLE, TaskConfig, decode_task, fresh_job
from trireme.launch.engines import all_options, task_options
from trireme.plugins import Plugins, not_installed
from trireme.printable import printable

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Launched:
    """A process that another launcher started.

    Attributes:
        by: the name of the launcher, for messages.
        task: the process: one of a group that holds a model, without the job's options; or a task
            of a cluster with servers.
        options: the options of the job that the launcher gave, by their fields.
        words: the arguments of `trireme task` for the same task.
    """

    by: str
    task: TaskConfig | ClusterTask
    options: Mapping[str, str | None] = field(default_factory=dict)
    words: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Environment:
    """What some launchers leave in the environment of a process, or on its command line.

    Attributes:
        find: returns what variables and arguments say; None if they are of none of its launchers.
        check: raises an error if a launcher started the process that it cannot read.
        own_arguments: returns the arguments of a program that are not for `find`.
    """

    find: Callable[[Mapping[str, str], Sequence[str]], Launched | None]
    check: Callable[[Mapping[str, str]], None] = lambda environ: None
    own_arguments: Callable[[Sequence[str]], list[str]] = list


ENVIRONMENTS = Plugins("trireme.environments", "environment", Environment)
"""Every installed one."""

_MARKS = ("RANK", "TF_CONFIG", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_STEP_ID")
"""Variables of launchers without which a process would train alone, where others are beside it."""


def current_task() -> TaskConfig:
    """Returns the task that this process is.

    In a process that another launcher names as a parameter server this function does not return:
    the process becomes that server.
    """
    if TASK_VARIABLE in os.environ:
        task = detect()
    else:
        try:
            launched = find_launched(os.environ, sys.argv[1:])
            task = _task_of(launched, os.environ, None)
        except TriremeError:
            sys.excepthook = partial(_print_error, "")
            raise
        if launched is not None:
            rank = f"rank {task.group.rank}: " if task.group.size > 1 else ""
            sys.excepthook = partial(_print_error, rank)
        if launched is not None and task.role != "worker":
            # TensorFlow's programs wait in `server.join()` here. A server runs none of this.
            sys.stdout.flush()
            sys.stderr.flush()
            command = [sys.executable, "-m", "trireme", "task", *launched.words]
            os.execv(sys.executable, command)
    if task.group.size > 1 and (task.group.one_host or is_loopback(task.group.address)):
        _stay_on_loopback(os.environ)
    return task


def program_arguments() -> list[str]:
    """Returns the arguments of this program, without the classic flags that name its task.

    A program of your own that takes `--job_name` and the other flags as its launcher's hands this
    list to its parser: `parser.parse_args(trireme.program_arguments())`. In a task that `trireme`
    has started all arguments are the program's own.
    """
    arguments = sys.argv[1:]
    if TASK_VARIABLE not in os.environ:
        for environment in ENVIRONMENTS.all().values():
            arguments = environment.own_arguments(arguments)
    return arguments


def detect(
    environ: Mapping[str, str] | None = None,
    directory: Path | None = None,
    arguments: Sequence[str] = (),
) -> TaskConfig:
    """Returns the task that this process is."""
    environ = os.environ if environ is None else environ
    if TASK_VARIABLE not in environ:
        return _task_of(find_launched(environ, arguments), environ, directory)
    task = decode_task(environ[TASK_VARIABLE])
    if "secret" not in task.descriptors:
        return task
    secret, certificates = receive_secret(task.descriptors["secret"], task.job)
    return msgspec.structs.replace(task, secret=secret, certificates=certificates)


def find_launched(environ: Mapping[str, str], arguments: Sequence[str] = ()) -> Launched | None:
    """Returns what another launcher says of this process; None if none started it."""
    environments = ENVIRONMENTS.all()
    for environment in environments.values():
        if (launched := environment.find(environ, arguments)) is not None:
            return launched
    for environment in environments.values():
        environment.check(environ)
    names = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in arguments}
    marks = [name for name in _MARKS if environ.get(name)]
    marks += ["--job_name"] if {"job_name", "ps_hosts"} <= names else []
    if marks and "launchers" not in environments:
        raise ConfigurationError(
            not_installed(f"what {marks[0]} says of a task of another launcher", "environments")
        )
    return None


def _task_of(
    launched: Launched | None, environ: Mapping[str, str], directory: Path | None
) -> TaskConfig:
    if launched is None:
        _warn_of_variables(environ)
        return TaskConfig(job=fresh_job())
    file = read_file(None, directory)
    if isinstance(launched.task, ClusterTask):
        config = read_config(launched.options, environ, file, task_options())
        return manual_task(launched.task, config, environ)
    return _with_options(launched.by, launched.task, read_config(launched.options, environ, file))


def worker_of_servers(
    servers: str,
    worker: int,
    workers: int,
    environ: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> TaskConfig:
    """Returns a worker of servers that were started by hand, for a program without launcher."""
    environ = os.environ if environ is None else environ
    if TASK_VARIABLE in environ or find_launched(environ) is not None:
        raise ConfigurationError(
            f"the program names its servers itself ({servers}), and its launch has made this "
            "process a task of a job already: start it by python, or leave the servers out"
        )
    named = ClusterTask("worker", worker, ClusterSpec.of_servers(servers, workers))
    config = read_config({}, environ, read_file(None, directory), task_options())
    return manual_task(named, config, environ)


def _warn_of_variables(environ: Mapping[str, str]) -> None:
    """Warns of launch options in the environment of a program that no launcher started."""
    read_config({}, environ, None)  # refuses misspelt variables
    without_effect = [o.variable for o in all_options() if environ.get(o.variable, "") != ""]
    if without_effect:
        _log.warning(
            "%s: options of a launch, which a program that is started by python alone does not "
            "have; start it with `trireme run`",
            ", ".join(without_effect),
        )


def _with_options(launcher: str, task: TaskConfig, config: JobConfig) -> TaskConfig:
    """Returns the task of one process of a group that holds a model together."""
    if config.tasks.ps:
        raise ConfigurationError(
            f"ps is {config.tasks.ps} ({config.origin('ps')}), and {launcher} starts "
            "workers alone: start a job with parameter servers by `trireme run` or `trireme task`, "
            "or leave ps out"
        )
    config = config.replaced(launcher, workers=task.workers)
    config.check_together(0)
    return msgspec.structs.replace(
        task,
        job=task.job or fresh_job(),
        config=config,
        # All processes write to one terminal or file, without their names before the lines.
        display="none" if task.group.rank else "plain",
    )


def _stay_on_loopback(environ: MutableMapping[str, str]) -> None:
    """Keeps a process group whose processes are all on one host off the network.

    gloo and NCCL listen at the address that the host's name resolves to, or at a network card's.
    Only environment variables change that.
    """
    import psutil  # rarely needed, and slow to load

    names = [
        name
        for name, entries in psutil.net_if_addrs().items()
        if any(e.family == socket.AF_INET and e.address == LOOPBACK for e in entries)
    ]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        environ.setdefault(variable, names[0] if names else "lo")


def _print_error(
    prefix: str, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Replaces `sys.excepthook`: prints one of Trireme's errors as one line, then exits."""
    if not isinstance(error, TriremeError):
        sys.__excepthook__(kind, error, trace)
        return
    # Not sys.stderr: torch.distributed wraps this hook, and drops what it prints when it exits.
    text = printable(" ".join(str(error).split()))
    print(f"{prefix}error: {text}", file=sys.__stderr__, flush=True)
    raise SystemExit(2 if isinstance(error, UsageError) else 1)


def check_no_task(what: str) -> None:
    """Checks that this process is no task of a job, which may not start another job."""
    if os.environ.get(TASK_VARIABLE):
        raise ConfigurationError(
            f"{what} starts a job, and this process is a task of a job already: run the program "
            "by python, and not by `trireme run`; or open a Session in it instead"
        )
