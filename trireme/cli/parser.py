"""What the command line understands: every command and option, in one place, without the doing."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from trireme.errors import UsageError
from trireme.launch.settings import ENGINE_OPTIONS, GANG_OPTIONS, OPTIONS, Option, suggestion

__all__ = ["COMMANDS", "NOT_BUILT", "TASK_OPTIONS", "Parser", "overview"]

NOT_BUILT = ("scale", "certs", "doctor", "plan", "bench")
NOT_BUILT_OPTIONS = ("replicas",)
TASK_OPTIONS = tuple(
    option
    for option in OPTIONS
    if option.name not in ("workers", "ps", "max-restarts", *GANG_OPTIONS, *ENGINE_OPTIONS)
)


class Parser(argparse.ArgumentParser):
    """A parser of one command that raises `UsageError`, and knows where a program begins.

    An option may be written with underscores for dashes, as the classic programs had them.
    """

    def __init__(self, command: str, usage: str, description: str) -> None:
        self.known: dict[str, bool] = {}  # every option, and whether a value follows it
        self.arguments: list[argparse.Action] = []  # in the order of the help
        super().__init__(
            prog=f"trireme {command}",
            usage=f"trireme {command} {usage}",
            description=description,
            allow_abbrev=False,
            formatter_class=lambda prog: argparse.HelpFormatter(
                prog, max_help_position=34, width=100
            ),
        )

    def add_argument(self, *names: Any, **keywords: Any) -> argparse.Action:
        """Adds an argument as `argparse` does, and remembers it."""
        action = super().add_argument(*names, **keywords)
        self.arguments.append(action)
        for name in action.option_strings:
            self.known[name] = action.nargs is None
        return action

    def error(self, message: str) -> NoReturn:
        """Raises what `argparse` would print before it exits.

        Raises:
            UsageError: always.
        """
        raise UsageError(f"{self.prog}: {message}")

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Reads the arguments of a command that takes no program.

        Raises:
            UsageError: an option or an argument that the command does not know.
        """
        words: list[str] = []
        options: list[str] = []
        rest: Sequence[str] = arguments
        while rest:
            head, rest = self.split(rest)
            options += head
            words += rest[:1]
            rest = rest[1:]
        return self.parse_args([*options, "--", *words] if words else options)

    def split(self, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
        """Splits before the first word that is no option: the program, whose options are its own.

        Returns:
            The options, with dashes for underscores in their names; and the rest, untouched.

        Raises:
            UsageError: an option that the command does not know.
        """
        head: list[str] = []
        position = 0
        while position < len(arguments):
            word = arguments[position]
            if word == "--":
                position += 1
                break
            if not word.startswith("-") or word == "-":
                break
            name, equals, value = word.partition("=")
            name = self._known(name)
            head.append(name + equals + value)
            position += 1
            if self.known[name] and not equals:
                head += arguments[position : position + 1]
                position += 1
        return head, list(arguments[position:])

    def _known(self, name: str) -> str:
        dashed = "--" + name[2:].replace("_", "-") if name.startswith("--") else name
        if dashed not in self.known:
            raise UsageError(
                f"`{self.prog}` has no option {name}{suggestion(dashed, self.known)}; "
                f"`{self.prog} --help` lists them"
            )
        return dashed


def _add(parser: Parser, option: Option) -> None:
    if option.metavar:
        parser.add_argument(f"--{option.name}", metavar=option.metavar, help=option.help)
    else:
        parser.add_argument(f"--{option.name}", action="store_const", const="yes", help=option.help)


def _run() -> Parser:
    parser = Parser(
        "run",
        "[OPTIONS] SCRIPT [ARGS...]",
        "Starts SCRIPT as the workers of a job, with its parameter servers and its coordinator, on "
        "this host or on a Ray cluster, and stays until all have ended. Ctrl-C once: they save and "
        "end; twice: they end at once. Each option may also be set by an environment variable such "
        "as TRIREME_WORKERS, or in trireme.toml or pyproject.toml ([tool.trireme]).",
    )
    for option in OPTIONS:
        _add(parser, option)
    parser.add_argument(
        "--config", metavar="FILE", help="read options from FILE, and not from the directory's own"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print every option with its origin and how the model would be laid out; no training",
    )
    parser.add_argument(
        "--allow-plaintext",
        action="store_true",
        help="ray: tasks of several hosts talk although nothing is encrypted: for networks you "
        "trust",
    )
    for name in NOT_BUILT_OPTIONS:
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    return parser


def _task() -> Parser:
    parser = Parser(
        "task",
        "--job-name ROLE --task-index I --ps-hosts a:p,... --worker-hosts a:p,...\n"
        "                    [OPTIONS] [SCRIPT ARGS...]",
        "Runs one task of a job in this process. Start each task on its machine with the same "
        "lists of hosts; ps:0 hosts the coordinator unless --coordinator names another address. "
        "Options may be written with underscores, as in --job_name.",
    )
    parser.add_argument("--job-name", metavar="ROLE", help="ps, worker, coordinator or aggregator")
    parser.add_argument("--task-index", metavar="I", help="which of them, from 0 (default 0)")
    parser.add_argument("--ps-hosts", metavar="HOSTS", help="the servers: host:port,host:port,...")
    parser.add_argument("--worker-hosts", metavar="HOSTS", help="the workers, likewise")
    parser.add_argument(
        "--coordinator",
        "--coordinator-host",
        metavar="HOST:PORT",
        help="where a task of role coordinator listens",
    )
    parser.add_argument(
        "--sync-replicas",
        nargs="?",
        const="true",
        metavar="true|false",
        help="the classic name of --strategy sync",
    )
    parser.add_argument(
        "--replicas-to-aggregate", metavar="R", help="the classic name of --aggregate"
    )
    for option in TASK_OPTIONS:
        _add(parser, option)
    parser.add_argument("--config", metavar="FILE", help="read options from FILE")
    parser.add_argument(
        "--secret-file",
        metavar="FILE",
        help="the job's secret, the same for every task (default: TRIREME_SECRET; for tasks of "
        "one host a file of this user's own)",
    )
    parser.add_argument(
        "--allow-plaintext",
        action="store_true",
        help="listen beyond this host although nothing is encrypted: for networks you trust",
    )
    parser.add_argument(
        "--address-file",
        metavar="FILE",
        help="write the address that a server or coordinator listens at into FILE",
    )
    parser.add_argument("--tied-to", help=argparse.SUPPRESS)
    parser.add_argument("--listen-host", help=argparse.SUPPRESS)
    parser.add_argument("--outcome-file", help=argparse.SUPPRESS)
    parser.add_argument("--attendance-file", help=argparse.SUPPRESS)
    return parser


def _status() -> Parser:
    parser = Parser("status", "[--json] RUN", "Says how the job in the run directory RUN is.")
    parser.add_argument("run", metavar="RUN", help="a run directory")
    parser.add_argument("--json", action="store_true", help="for programs")
    return parser


def _top() -> Parser:
    parser = Parser(
        "top",
        "[--speed X] RUN",
        "Shows the job in the run directory RUN as it goes: its tasks, their steps and phases, who "
        "waits for whom. A job that has ended is played again from its records. Without a "
        "terminal: a line each second. Ctrl-C ends it.",
    )
    parser.add_argument("run", metavar="RUN", help="a run directory")
    parser.add_argument(
        "--speed", metavar="X", help="how much faster to play again (default: ten seconds in all)"
    )
    return parser


def _report() -> Parser:
    parser = Parser(
        "report",
        "[--output FILE] RUN",
        "Writes the run in the run directory RUN as one page of HTML that needs nothing else: "
        "curves, where the time went, configuration, checkpoints, why it failed.",
    )
    parser.add_argument("run", metavar="RUN", help="a run directory")
    parser.add_argument(
        "--output", metavar="FILE", help="the file to write (default RUN/report.html)"
    )
    return parser


def _stop() -> Parser:
    parser = Parser(
        "stop",
        "[--timeout SECONDS] RUN",
        "Has the job in the run directory RUN save and end, and waits for that.",
    )
    parser.add_argument("run", metavar="RUN", help="a run directory")
    parser.add_argument(
        "--timeout", metavar="SECONDS", default="90", help="how long to wait (default 90)"
    )
    return parser


def _checkpoint() -> Parser:
    parser = Parser(
        "checkpoint",
        "ls|show|verify|export RUN [--step N] [--output FILE]",
        "Lists the checkpoints in the run directory RUN, shows what one holds, verifies every "
        "byte of one, or exports its model as one plain safetensors file. Without --step: the "
        "newest.",
    )
    parser.add_argument("action", metavar="ACTION", help="ls, show, verify or export")
    parser.add_argument("run", metavar="RUN", help="a run directory")
    parser.add_argument("--step", metavar="N", help="the checkpoint of global step N")
    parser.add_argument(
        "--output", metavar="FILE", help="export: the file to write (default model.safetensors)"
    )
    return parser


COMMANDS: dict[str, tuple[Callable[[], Parser], str]] = {
    "run": (_run, "start a job, on this host or on Ray: workers, parameter servers, coordinator"),
    "task": (_task, "run one task of a job, started by hand on its machine"),
    "status": (_status, "say how a job is"),
    "top": (_top, "watch a job as it goes, or play again one that has ended"),
    "report": (_report, "write a run as one page of HTML"),
    "stop": (_stop, "have a job save and end"),
    "checkpoint": (_checkpoint, "list, show, verify or export checkpoints"),
}
"""Every command: what makes its parser, and what it does in a few words."""


def overview() -> str:
    """Returns the text of `trireme --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: trireme COMMAND ...",
            "",
            "One training program, written for one device; at launch, how it is spread.",
            "",
            "commands:",
            *lines,
            "",
            "  trireme COMMAND --help says more; trireme --version names the release.",
            "",
            "exit status: 0 finished, 1 a task failed, 2 bad usage, 130 interrupted and saved",
        ]
    )
