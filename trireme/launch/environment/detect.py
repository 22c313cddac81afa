"""Reads from the environment which task this process is.

`TRIREME_TASK` describes the task completely. Without it, the classic flags on the command line do
(`--job_name=worker --ps_hosts=...`), or the variables of another launcher:
torchrun's, `TF_CONFIG`, MPI's or Slurm's. Without any of them this process is a job of its own,
with one worker and no server, unless a launcher that is not supported has started several.

`trireme` reports the failures of the processes that it starts. A process of another launcher
reports its own failure, in one line, because many processes write to one terminal.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import cast

import msgspec

from trireme.certificates import encryption
from trireme.cluster.spec import LOOPBACK, ClusterSpec, ClusterTask, is_loopback
from trireme.errors import ConfigurationError, TriremeError, UsageError
from trireme.job_config import JobConfig
from trireme.launch.config.secret import find_secret, receive_secret
from trireme.launch.config.sources import read_config, read_file
from trireme.launch.config.task_config import (
    TASK_VARIABLE,
    Role,
    TaskConfig,
    decode_task,
    fresh_job,
)
from trireme.launch.engines import all_options, task_options
from trireme.launch.environment.classic_flags import (
    classic_strategy,
    classic_task,
    split_flags,
)
from trireme.launch.environment.other_launchers import VARIABLES, check_no_other_launcher
from trireme.launch.environment.process_launchers import (
    LAUNCHER_VARIABLES,
    RANK_VARIABLES,
    TORCHRUN,
    find_launched_task,
)
from trireme.launch.environment.tf_config import TF_VARIABLE, read_tf_config, tf_worker
from trireme.launch.process_setup.resources import threads_of_task
from trireme.location import local_directory
from trireme.printable import printable

JOB = "by-hand"
"""The id of every job started by hand, as there is no launcher to choose one for all of its tasks.
Address and secret keep such jobs apart."""

_log = logging.getLogger(__name__)


def current_task() -> TaskConfig:
    """Returns the task that this process is.

    In a process that `TF_CONFIG` or the classic flags name as a parameter server this function does
    not return: the process becomes that server.
    """
    own = (*LAUNCHER_VARIABLES, TF_VARIABLE)
    launched = any(
        name in own or VARIABLES.fullmatch(name) for name, set_ in os.environ.items() if set_
    )
    flags, _ = split_flags(sys.argv[1:])
    if TASK_VARIABLE not in os.environ and (launched or flags):
        sys.excepthook = _print_error
    task = detect(arguments=sys.argv[1:])
    if task.role != "worker":
        # TensorFlow's programs wait in `server.join()` here. A server runs none of this program.
        sys.stdout.flush()
        sys.stderr.flush()
        words = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
        os.execv(sys.executable, [sys.executable, "-m", "trireme", "task", *words])
    if task.group.size > 1 and (task.group.one_host or is_loopback(task.group.address)):
        _stay_on_loopback(os.environ)
    return task


def program_arguments() -> list[str]:
    """Returns the arguments of this program, without the classic flags that name its task.

    A program of your own that takes `--job_name` and the other flags as its launcher's hands this
    list to its parser: `parser.parse_args(trireme.program_arguments())`. In a task that `trireme`
    has started all arguments are the program's own.
    """
    return sys.argv[1:] if TASK_VARIABLE in os.environ else split_flags(sys.argv[1:])[1]


def detect(
    environ: Mapping[str, str] | None = None,
    directory: Path | None = None,
    arguments: Sequence[str] = (),
) -> TaskConfig:
    """Returns the task that this process is."""
    environ = os.environ if environ is None else environ
    if TASK_VARIABLE in environ:
        task = decode_task(environ[TASK_VARIABLE])
        if "secret" not in task.descriptors:
            return task
        secret, certificates = receive_secret(task.descriptors["secret"], task.job)
        return msgspec.structs.replace(task, secret=secret, certificates=certificates)
    if flags := split_flags(arguments)[0]:
        return _flagged_task(flags, environ, directory)
    launched = find_launched_task(environ, TORCHRUN)
    tf = read_tf_config(environ[TF_VARIABLE]) if environ.get(TF_VARIABLE, "").strip() else None
    if launched is None and tf is not None:
        if tf.cluster.ps:
            config = read_config({}, environ, read_file(None, directory), task_options())
            return manual_task(tf, config, environ)
        launched = TF_VARIABLE, tf_worker(tf, environ)
    launched = launched or find_launched_task(environ)
    if launched is None:
        check_no_other_launcher(environ)
        _warn_of_variables(environ)
        return TaskConfig(job=fresh_job())
    return _with_options(*launched, read_config({}, environ, read_file(None, directory)))


def _flagged_task(
    flags: Mapping[str, str], environ: Mapping[str, str], directory: Path | None
) -> TaskConfig:
    named = classic_task(flags)
    given = {"aggregate": flags.get("aggregate"), "strategy": classic_strategy(flags)}
    config = read_config(given, environ, read_file(None, directory), task_options())
    task = manual_task(named, config, environ)
    _log.warning(
        "%s by the flags on the command line (--job_name, ...): %d workers, servers at %s",
        task.name,
        task.workers,
        ", ".join(named.cluster.ps),
    )
    return task


def worker_of_servers(
    servers: str,
    worker: int,
    workers: int,
    environ: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> TaskConfig:
    """Returns a worker of servers that were started by hand, for a program without launcher."""
    environ = os.environ if environ is None else environ
    if TASK_VARIABLE in environ or environ.get(TF_VARIABLE) or find_launched_task(environ):
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


def manual_task(
    named: ClusterTask,
    config: JobConfig,
    environ: Mapping[str, str],
    secret_file: Path | None = None,
) -> TaskConfig:
    """Returns a task of a cluster."""
    role, index, cluster = named.role, named.index, named.cluster
    if not cluster.ps:
        raise ConfigurationError(
            "a job started by hand needs a parameter server: name at least one host:port with "
            "--ps-hosts, the same for every task"
        )
    cluster.check_task(role, index)
    if role == "coordinator" and cluster.coordinator is None:
        raise ConfigurationError(
            "a task of role coordinator needs its address: give --coordinator host:port to it and "
            "to every other task; without one, ps:0 hosts the coordinator"
        )
    addresses = [a for a in (*cluster.ps, *cluster.worker, cluster.coordinator) if a]
    loopback = all(map(is_loopback, addresses))
    certs = _certificates_path(config)
    certificates = ""
    if certs is not None:
        certificates = encryption().read(certs, f"{role}:{index}")
    if not loopback and not certificates and not config.network.allow_plaintext:
        raise ConfigurationError(
            "the tasks of this job are on several hosts, and this one has no certificate to "
            "encrypt what it sends. On one host: `trireme certs init DIR`, then `trireme certs "
            f"issue DIR --task {role}:{index}` and so on for every task. Copy each task its own "
            "file and DIR/job.secret, and start it with --certs DIR. Only if you trust everybody "
            "on the network between the hosts: --allow-plaintext"
        )
    if not loopback and not certificates:
        _log.warning(
            "WARNING: nothing between the hosts is encrypted (allow-plaintext, by the %s): "
            "everybody on the network between them can read and change it",
            config.origin("allow_plaintext"),
        )
    beside = certs.parent if certs is not None and certs.is_file() else certs
    secret = find_secret(secret_file, environ, loopback=loopback, certificates=beside)
    scheme = "tls" if certificates else config.scheme
    workers, servers = len(cluster.worker), len(cluster.ps)
    config = config.replaced("the hosts", workers=workers, ps=servers)
    config.check_together(servers)
    return TaskConfig(
        job=JOB,
        role=cast(Role, role),
        index=index,
        workers=workers,
        servers=servers,
        coordinator=f"{scheme}://{cluster.coordinator_address}",
        listen="" if role == "worker" else f"{scheme}://{cluster.address(role, index)}",
        secret=secret,
        certificates=certificates,
        config=config,
        connect_timeout=config.timeouts.join_timeout,
        # Of other hosts it is not known which tasks share them.
        threads=threads_of_task(environ, workers + servers if loopback else 1),
    )


def _certificates_path(config: JobConfig) -> Path | None:
    if config.network.certs is not None:
        return Path(config.network.certs)
    if config.output.run_dir is None:
        return None
    usual = local_directory(config.output.run_dir) / "certs"
    return usual if usual.is_dir() else None


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
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Replaces `sys.excepthook`: prints one of Trireme's errors as one line, then exits."""
    if not isinstance(error, TriremeError):
        sys.__excepthook__(kind, error, trace)
        return
    rank = next((os.environ[name] for name in RANK_VARIABLES if os.environ.get(name)), "")
    prefix = f"rank {rank}: " if rank.isdecimal() else ""
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
