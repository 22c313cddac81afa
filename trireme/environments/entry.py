"""What the plug-in adds: the environment `launchers` and the command `task`.

Flags come first, then variables, those of inner launchers before those of outer ones.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from trireme.cli.command import Command, Parser, add_option
from trireme.environments.by_hand import manual_task, task_options
from trireme.environments.cluster import ClusterSpec, ClusterTask
from trireme.environments.flags import check_flags, find_flagged, split_flags
from trireme.environments.found import Launched, task_of
from trireme.environments.launchers import TORCHRUN, find_launched_task
from trireme.environments.node_launchers import find_node
from trireme.environments.secret import find_secret
from trireme.environments.tf_config import find_tf_task
from trireme.environments.unknown import check_no_other_launcher
from trireme.errors import ConfigurationError
from trireme.launch.config.sources import read_config, read_file
from trireme.launch.config.task_config import TASK_VARIABLE, TaskConfig
from trireme.launch.environment import Environment


def find_launched(environ: Mapping[str, str], arguments: Sequence[str] = ()) -> Launched | None:
    """Returns what another launcher says of this process; None if none started it."""
    return (
        find_flagged(arguments)
        or find_launched_task(environ, TORCHRUN)
        or find_tf_task(environ)
        or find_launched_task(environ)
        or find_node(environ)
    )


def _find(
    environ: Mapping[str, str], arguments: Sequence[str], directory: Path | None
) -> TaskConfig | None:
    launched = find_launched(environ, arguments)
    if launched is not None:
        return task_of(launched, environ, directory)
    check_no_other_launcher(environ)
    check_flags(arguments)
    return None


def _serve(arguments: Sequence[str]) -> NoReturn:
    flags, _ = split_flags(arguments)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "trireme", "task", *words])


def _join(
    servers: str, worker: int, workers: int, environ: Mapping[str, str], directory: Path | None
) -> TaskConfig:
    if TASK_VARIABLE in environ or find_launched(environ) is not None:
        raise ConfigurationError(
            f"the program names its servers itself ({servers}), and its launch has made this "
            "process a task of a job already: start it by python, or leave the servers out"
        )
    named = ClusterTask("worker", worker, ClusterSpec.of_servers(servers, workers))
    config = read_config({}, environ, read_file(None, directory), task_options())
    return manual_task(named, config, environ)


LAUNCHERS = Environment(_find, _serve, lambda words: split_flags(words)[1], _join, find_secret)


def _task() -> Parser:
    parser = Parser(
        "task",
        "--job-name ROLE --task-index I --ps-hosts a:p,... --worker-hosts a:p,...\n"
        "                    [OPTIONS] [SCRIPT|-m MODULE ARGS...]",
        "Runs one task of a job in this process. Start each task on its machine with the same "
        "lists of hosts; ps:0 hosts the coordinator unless --coordinator names another address. "
        "Options may be written with underscores, as in --job_name.",
    )
    parser.add("--job-name ROLE", "ps, worker or coordinator")
    parser.add("--task-index, --task-id I", "the task's index in its role, from 0 (default 0)")
    parser.add("--ps-hosts HOSTS", "the servers: host:port,host:port,...")
    parser.add("--worker-hosts HOSTS", "the workers, likewise")
    parser.add(
        "--coordinator, --coordinator-host HOST:PORT",
        "the address of a task of role coordinator (default: ps:0 hosts it)",
    )
    parser.add(
        "--sync-replicas true|false", "the classic name of --strategy sync", nargs="?", const="true"
    )
    for option in task_options():
        add_option(parser, option)
    parser.add_module()
    parser.add("--config FILE", "read options from FILE")
    parser.add(
        "--secret-file FILE",
        "the file with the job's secret, the same for every task (default: TRIREME_SECRET; for "
        "tasks of one host a file of this user)",
        type=Path,
    )
    parser.add(
        "--address-file FILE",
        "write the address at which a server or coordinator listens into FILE",
        type=Path,
    )
    parser.add(
        "--journal FILE",
        "of the coordinator, or of ps:0 where it hosts that: keep in FILE what is decided; started"
        " again with it, the coordinator goes on, and training goes on meanwhile",
        type=Path,
    )
    return parser


TASK = Command(
    "run one task of a job, started by hand on its machine",
    _task,
    "trireme.environments.command:main",
)
