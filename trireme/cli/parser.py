"""The commands of this package: their parsers, with every option and help text."""

from __future__ import annotations

import argparse
from pathlib import Path

from trireme.cli.command import Command, Parser, add_option
from trireme.launch.engines import all_options, task_options


def _run() -> Parser:
    parser = Parser(
        "run",
        "[OPTIONS] SCRIPT|-m MODULE [ARGS...]",
        "Starts SCRIPT as the workers of a job, with its parameter servers and its coordinator, on "
        "this host or where --on says, and returns when all tasks have ended. At the first Ctrl-C "
        "the workers save and end; at the second, all tasks end at once. Each option may also be "
        "set by an environment variable such as TRIREME_WORKERS, or in trireme.toml or "
        "pyproject.toml ([tool.trireme]).",
    )
    for option in all_options():
        add_option(parser, option)
    parser.add("--config FILE", "read options from FILE instead of trireme.toml or pyproject.toml")
    parser.add_module()
    parser.add(
        "--dry-run",
        "print every option with its origin and the layout of the model; do not train",
        action="store_true",
    )
    return parser


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
    parser.add_argument("--tied-to", help=argparse.SUPPRESS)
    return parser


def _stop() -> Parser:
    parser = Parser(
        "stop",
        "[--timeout SECONDS] RUN",
        "Asks the job in the run directory RUN to save and end, and waits until it has ended.",
    )
    parser.add("RUN", "a run directory")
    parser.add("--timeout SECONDS", "how long to wait (default 90)", default="90")
    return parser


RUN = Command(
    "start a job, on this host or on Ray: workers, parameter servers, coordinator",
    _run,
    "trireme.cli.run:main",
)
TASK = Command(
    "run one task of a job, started by hand on its machine", _task, "trireme.cli.tasks.task:main"
)
STOP = Command("ask a job to save and end", _stop, "trireme.cli.stop:main")
