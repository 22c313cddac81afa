"""`trireme completion SHELL`: the script by which a shell completes `trireme` commands."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import shtab

from trireme.cli.command import COMMANDS, Parser
from trireme.cluster.spec import ROLES
from trireme.completion.entry import COMPLETION
from trireme.launch.engines import ENGINES, all_options

_WORDS: Mapping[tuple[str, str], Sequence[str]] = {("task", "job_name"): ROLES}
"""The words that an argument takes whose parser has no choices, by command and argument."""

_KINDS: Mapping[str, object] = {
    "RUN": shtab.DIRECTORY,
    "DIR": shtab.DIRECTORY,
    "FILE": shtab.FILE,
    "PATH": shtab.FILE,
}
"""How an argument is completed that takes no words of ours, by its metavar."""


def main(arguments: Sequence[str]) -> int:
    """Prints the script and returns 0."""
    print(script(COMPLETION.parser().read(arguments).shell))
    return 0


def script(shell: str) -> str:
    """Returns the script for a shell."""
    whole = argparse.ArgumentParser(prog="trireme", description="Trains on many processes")
    whole.add_argument("--version", action="store_true", help="show the versions")
    commands = whole.add_subparsers(dest="command")
    for name, command in COMMANDS.all().items():
        parser = command.parser()
        _describe(name, parser)
        added = commands.add_parser(name, help=command.summary, parents=[parser], add_help=False)
        if parser.module:  # it takes a program
            _complete(added.add_argument("SCRIPT", nargs="?", help="the program"), shtab.FILE)
            _complete(added.add_argument("ARGS", nargs="*", help="its arguments"), shtab.FILE)
    text: str = shtab.complete(whole, shell=shell)
    return text


def _describe(command: str, parser: Parser) -> None:
    choices = {o.field: o.values() if o.values else _literals(o.type) for o in all_options()}
    choices["on"] = ENGINES.names()
    for action in parser.arguments:
        words = _WORDS.get((command, action.dest)) or choices.get(action.dest)
        if words and action.nargs != 0:
            action.choices = list(words)
        elif str(action.metavar) in _KINDS:
            _complete(action, _KINDS[str(action.metavar)])


def _complete(action: argparse.Action, by: object) -> None:
    action.complete = by  # type: ignore[attr-defined]


def _literals(kind: Any) -> list[str]:
    if isinstance(kind, str):
        return [kind]
    return [word for part in get_args(kind) for word in _literals(part)]
