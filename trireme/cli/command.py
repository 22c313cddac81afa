"""A subcommand of `trireme`, as an entry point declares it, and the parser of its arguments."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from trireme import plugins
from trireme.errors import UsageError, suggestion
from trireme.job_config import Option, field_of
from trireme.launch.hooks import LAUNCH_HOOKS, check_hooks
from trireme.launch.process_setup.program import MODULE
from trireme.plugins import Plugins

_OF_TASKS = ("--job-name", "--task-index", "--ps-hosts", "--worker-hosts")


class Parser(argparse.ArgumentParser):
    """The parser of one command. It raises `UsageError`, and finds where the program begins.

    An option may be written with underscores instead of dashes, as in classic programs.
    """

    def __init__(self, command: str, usage: str, description: str) -> None:
        self.arguments: list[argparse.Action] = []  # in the order of the help
        self.module = ""  # the word that begins a program which is a module, where there is one
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
        """Adds an argument as `argparse` does, and records it."""
        action = super().add_argument(*names, **keywords)
        self.arguments.append(action)
        return action

    def add(self, usage: str, text: str, **keywords: Any) -> None:
        """Adds an argument as its usage writes it, such as `--step N` or `RUN`."""
        words = usage.split()
        names = [word.rstrip(",") for word in words if word.startswith("-")] or [usage.lower()]
        if not words[-1].startswith("-"):
            keywords["metavar"] = words[-1]
        self.add_argument(*names, help=text, **keywords)

    def add_module(self) -> None:
        """Lets the program be a module, after `-m`."""
        self.module = MODULE
        self.add_argument(
            MODULE,
            metavar="MODULE",
            help="run the module MODULE, as python -m does, in place of SCRIPT; after all options, "
            "as what follows are its arguments",
        )

    def error(self, message: str) -> NoReturn:
        """Raises an error with the message that `argparse` would print."""
        raise UsageError(f"{self.prog}: {message}")

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Reads the arguments of a command that takes no program."""
        words: list[str] = []
        options, rest = self.split(arguments)
        while rest:
            words.append(rest[0])
            head, rest = self.split(rest[1:])
            options += head
        return self.parse_args([*options, "--", *words] if words else options)

    def split(self, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
        """Splits before the first word that is no option, which is the program."""
        head: list[str] = []
        position = 0
        while position < len(arguments):
            word = arguments[position]
            if word == "--":
                position += 1
                break
            if not word.startswith("-") or word in ("-", self.module):
                break
            name, equals, value = word.partition("=")
            name, takes_value = self._known(name)
            head.append(name + equals + value)
            position += 1
            if takes_value and not equals:
                head += arguments[position : position + 1]
                position += 1
        return head, list(arguments[position:])

    def _known(self, name: str) -> tuple[str, bool]:
        dashed = "--" + name[2:].replace("_", "-") if name.startswith("--") else name
        known = {each: action for action in self.arguments for each in action.option_strings}
        if dashed not in known:
            if dashed[2:] in plugins.known(LAUNCH_HOOKS.group):
                LAUNCH_HOOKS.load(dashed[2:])  # raises where its plug-in is not installed
                check_hooks({field_of(dashed[2:]): name})
            by_hand = "`trireme task` has it, and starts one task by hand; " * (dashed in _OF_TASKS)
            raise UsageError(
                f"`{self.prog}` has no option {name}{suggestion(dashed, known)}; "
                f"{by_hand}`{self.prog} --help` lists them"
            )
        return dashed, known[dashed].nargs is None


def number(option: str, text: str, what: str, accepts: Callable[[float], bool]) -> float:
    """Returns the number that an option gives; `what` says in words which ones it accepts."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not accepts(value):
        raise UsageError(f"{option} is {text!r}: it must be {what}")
    return value


def add_option(parser: Parser, option: Option) -> None:
    """Adds an option of a job to a command."""
    names = [f"--{name}" for name in (option.name, option.classic) if name]
    switch = {} if option.metavar else {"action": "store_const", "const": "yes"}
    parser.add(f"{', '.join(names)} {option.metavar}".strip(), option.described, **switch)


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand of `trireme`. Its module should import fast: `trireme --help` imports it."""

    summary: str  # one line for `trireme --help`, without a capital letter and a full stop
    parser: Callable[[], Parser]  # makes the parser of its arguments
    # the function that runs it, as `package.module:function`. It takes the arguments after the
    # command's name and returns the exit status. It is imported when the command runs
    main: str


COMMANDS = Plugins("trireme.commands", "command", Command)  # every installed command
