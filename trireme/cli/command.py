"""A subcommand of `trireme`, as an entry point declares it."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trireme.cli.command_parser import Parser
from trireme.plugins import Plugins


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand of `trireme`. Its module should import fast: `trireme --help` imports it.

    Attributes:
        summary: one line for `trireme --help`, without a capital letter and a full stop.
        parser: makes the parser of its arguments.
        main: the function that runs it, as `package.module:function`. It takes the arguments after
            the command's name and returns the exit status. It is imported when the command runs.
    """

    summary: str
    parser: Callable[[], Parser]
    main: str

    def run(self, arguments: Sequence[str]) -> int:
        """Runs the command and returns its exit status."""
        main: Callable[[Sequence[str]], int] = pkgutil.resolve_name(self.main)
        return main(arguments)


COMMANDS = Plugins("trireme.commands", "command", Command)
"""Every installed command."""
