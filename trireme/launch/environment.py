"""Reads from the environment which task this process is.

`TRIREME_TASK` describes the task completely. Without it, the plug-in `environments` finds what
another launcher has left: torchrun, Slurm, `TF_CONFIG`, or the flags of a task that is started by
hand. Otherwise this process is a job of its own, with one worker and no server.

`trireme` reports the failures of the processes that it starts. A process of another launcher
reports its own failure, in one line, because many processes write to one terminal.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType

import msgspec

from trireme.cluster.spec import is_loopback
from trireme.errors import ConfigurationError, TriremeError, UsageError
from trireme.launch.config.secret import receive_secret
from trireme.launch.config.sources import read_config
from trireme.launch.config.task_config import TASK_VARIABLE, TaskConfig, decode_task, fresh_job
from trireme.launch.engines import all_options
from trireme.plugins import Plugins, not_installed
from trireme.printable import printable

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Environment:
    """How tasks find out what they are that `trireme` has not started.

    Attributes:
        find: returns the task that variables and arguments name, with the options of its job; the
            directory has the file of options (None: the current one). None if they name no task.
        serve: has this process become the parameter server that its arguments name.
        own_arguments: returns the arguments of a program that are not for `find`.
        join: returns a worker of servers that the program itself names: their hosts, the worker's
            index, how many workers there are, the environment, and the directory, as for `find`.
        secret: returns the secret of a job that was started by hand, in hexadecimal digits, from a
            file, the environment, whether all tasks are on this host, and the certificates.
    """

    find: Callable[[Mapping[str, str], Sequence[str], Path | None], TaskConfig | None]
    serve: Callable[[Sequence[str]], object]
    own_arguments: Callable[[Sequence[str]], list[str]]
    join: Callable[[str, int, int, Mapping[str, str], Path | None], TaskConfig]
    secret: Callable[..., str]


ENVIRONMENTS = Plugins("trireme.environments", "environment", Environment)
LAUNCHERS = "launchers"
_MARKS = ("RANK", "TF_CONFIG", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_STEP_ID")
"""Variables of launchers without which a process would train alone, where others are beside it."""


def current_task() -> TaskConfig:
    """Returns the task that this process is.

    In a process that another launcher names as a parameter server this function does not return:
    the process becomes that server.
    """
    found = None
    if TASK_VARIABLE in os.environ:
        task = detect()
    else:
        try:
            found = _find(os.environ, sys.argv[1:], None)
            task = _alone(os.environ) if found is None else found
        except TriremeError:
            sys.excepthook = partial(_print_error, "")
            raise
        if found is not None:
            rank = f"rank {task.group.rank}: " if task.group.size > 1 else ""
            sys.excepthook = partial(_print_error, rank)
        if task.role != "worker":
            # TensorFlow's programs wait in `server.join()` here. A server runs none of this.
            ENVIRONMENTS.load(LAUNCHERS).serve(sys.argv[1:])
    if TASK_VARIABLE in os.environ or found is not None:
        _LEFT.setdefault(_key(task), False)
    if task.group.size > 1 and (task.group.one_host or is_loopback(task.group.address)):
        _stay_on_loopback(os.environ)
    return task


def program_arguments() -> list[str]:
    """Returns the arguments of this program, without the classic flags that name its task.

    A program of your own that takes `--job_name` and the other flags as its launcher's hands this
    list to its parser: `parser.parse_args(trireme.program_arguments())`. In a task that `trireme`
    has started all arguments are the program's own.
    """
    known = None if TASK_VARIABLE in os.environ else ENVIRONMENTS.find(LAUNCHERS)
    return sys.argv[1:] if known is None else known.own_arguments(sys.argv[1:])


def detect(
    environ: Mapping[str, str] | None = None,
    directory: Path | None = None,
    arguments: Sequence[str] = (),
) -> TaskConfig:
    """Returns the task that this process is."""
    environ = os.environ if environ is None else environ
    if TASK_VARIABLE not in environ:
        return _find(environ, arguments, directory) or _alone(environ)
    task = decode_task(environ[TASK_VARIABLE])
    if "secret" not in task.descriptors:
        return task
    secret, certificates = receive_secret(task.descriptors["secret"], task.job)
    return msgspec.structs.replace(task, secret=secret, certificates=certificates)


def _find(
    environ: Mapping[str, str], arguments: Sequence[str], directory: Path | None
) -> TaskConfig | None:
    """Returns what another launcher says of this process; None if none started it."""
    known = ENVIRONMENTS.find(LAUNCHERS)
    if known is not None:
        return known.find(environ, arguments, directory)
    names = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in arguments}
    marks = [name for name in _MARKS if environ.get(name)]
    marks += ["--job_name"] if {"job_name", "ps_hosts"} <= names else []
    if marks:
        raise ConfigurationError(
            not_installed(f"what {marks[0]} says of a task of another launcher", "environments")
        )
    return None


def worker_of_servers(servers: str, worker: int, workers: int) -> TaskConfig:
    """Returns a worker of servers that were started by hand, for a program without launcher."""
    return ENVIRONMENTS.load(LAUNCHERS).join(servers, worker, workers, os.environ, None)


def _alone(environ: Mapping[str, str]) -> TaskConfig:
    """Returns a job of its own; warns of launch options, which no launcher has read."""
    read_config({}, environ, None)  # refuses misspelt variables
    without_effect = [o.variable for o in all_options() if environ.get(o.variable, "") != ""]
    if without_effect:
        _log.warning(
            "%s: options of a launch, which a program that is started by python alone does not "
            "have; start it with `trireme run`",
            ", ".join(without_effect),
        )
    return TaskConfig(job=fresh_job())


def _stay_on_loopback(environ: MutableMapping[str, str]) -> None:
    """Keeps a process group whose processes are all on one host off the network.

    gloo and NCCL listen at the address that the host's name resolves to, or at a network card's.
    """
    cards = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in cards if name.startswith("lo")), "lo")
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        environ.setdefault(variable, loopback)


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


_LEFT: dict[tuple[object, ...], bool] = {}
"""For each part in a job that a launcher has started this process for, whether it has left it."""


def _key(task: TaskConfig) -> tuple[object, ...]:
    return task.job, task.name, task.coordinator, task.group.address


def leave_task(task: TaskConfig) -> None:
    """Notes that this process has left the job of a task."""
    if _key(task) in _LEFT:
        _LEFT[_key(task)] = True


def check_not_left(task: TaskConfig) -> None:
    """Raises `ConfigurationError` where this process has left the job that it was started for.

    Other tasks, or the checkpoints of the job, are of its first part in it.
    """
    shared = task.workers > 1 or task.servers or task.group.size > 1
    saved = "launcher" in task.descriptors and task.config.output.run_dir
    if _LEFT.get(_key(task)) and (shared or saved):
        raise ConfigurationError(
            f"{task.name} has left its job, and a launched program trains one model: one session, "
            "distribute or connect. To train several, as in cross-validation, start a job for "
            "each: by trireme.run(function, ...) in a program that plain python runs, or by a "
            "`trireme run` for each, with a run directory of its own. Under plain python alone a "
            "program may open one session after the other"
        )


def check_no_task(what: str) -> None:
    """Checks that this process is no task of a job, which may not start another job."""
    if os.environ.get(TASK_VARIABLE):
        raise ConfigurationError(
            f"{what} starts a job, and this process is a task of a job already: run the program "
            "by python, and not by `trireme run`; or open a Session in it instead"
        )
