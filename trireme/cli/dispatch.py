"""`trireme COMMAND ...`: finds the command, and turns errors into one line and an exit status."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from trireme.cli.parser import COMMANDS, NOT_BUILT, overview
from trireme.errors import TriremeError, UsageError
from trireme.launch.settings import suggestion

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: what comes after `trireme`; this process's own by default.

    Returns:
        The exit status: 0 for success, 1 if a task failed, 2 for bad usage, 130 if the run was
        interrupted after a clean save, 141 if whoever read the output has gone, as with `| head`.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _nobody_reads():
            raise
        return 128 + signal.SIGPIPE
    except UsageError as error:
        return _complain(error, 2)
    except TriremeError as error:
        return _complain(error, 1)
    except KeyboardInterrupt:
        return 130


def _nobody_reads() -> bool:
    """Returns whether standard output leads nowhere; then drops what is still to be written."""
    try:
        output = sys.stdout.fileno()
    except (OSError, ValueError):  # an object of somebody's own
        return False
    asked = select.poll()
    asked.register(output, 0)
    if not asked.poll(0):
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, output)
    os.close(nowhere)
    return True


def _run(arguments: Sequence[str]) -> int:
    if not arguments:
        print(overview(), file=sys.stderr)
        return 2
    name, *rest = arguments
    if name in ("-h", "--help", "help"):
        print(overview())
        return 0
    if name == "--version":
        from trireme import __version__

        print(f"trireme {__version__}")
        return 0
    return _command(name)(rest)


def _command(name: str) -> Callable[[Sequence[str]], int]:
    if name in NOT_BUILT:
        raise UsageError(f"`trireme {name}` is not there yet; there are: {', '.join(COMMANDS)}")
    if name not in COMMANDS:
        what = "option" if name.startswith("-") else "command"
        known = ("--help", "--version") if name.startswith("-") else tuple(COMMANDS)
        raise UsageError(
            f"there is no {what} {name}{suggestion(name, known)}; `trireme --help` lists them"
        )
    command: Callable[[Sequence[str]], int] = import_module(f"trireme.cli.{name}").main
    return command


def _complain(error: TriremeError, status: int) -> int:
    text = " ".join(str(error).split())
    print(f"trireme: error: {text}", file=sys.stderr)
    return status
