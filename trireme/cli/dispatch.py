"""`trireme COMMAND ...`: finds the command, and turns errors into one line and an exit status."""

from __future__ import annotations

import os
import platform
import signal
import sys
from collections.abc import Sequence

from trireme.cli.command import COMMANDS
from trireme.errors import ConfigurationError, TriremeError, UsageError, suggestion
from trireme.launch.config.task_config import TASK_VARIABLE, TASK_WORD
from trireme.printable import printable


def dispatch(arguments: Sequence[str]) -> int:
    """Runs one command; returns 141 if the reader of its output has gone, as with `| head`."""
    _open_standard_streams()
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        return 128 + signal.SIGPIPE
    except UsageError as error:
        return _complain(error, 2)
    except TriremeError as error:
        return _complain(error, 1)
    except OSError:
        if (refused := _refusal_of_output()) is None:
            raise
        return _complain(TriremeError(f"standard output cannot be written: {refused}"), 1)


def _open_standard_streams() -> None:
    """Opens `/dev/null` as each standard stream that is closed, as in some background programs.

    Else the next file that this process opens would be taken for it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # in this order: each takes the lowest free descriptor
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def _refusal_of_output() -> str | None:
    """Returns why standard output takes nothing, such as a full disk; None if it does.

    If so, discards further output, which would fail again when Python ends.
    """
    try:
        print(flush=True)
    except OSError as error:
        _discard_output()
        return error.strerror or str(error)
    return None


def _discard_output() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def _run(arguments: Sequence[str]) -> int:
    if not arguments:
        print(overview(), file=sys.stderr)
        return 2
    name, *rest = arguments
    if name in ("-h", "--help", "help"):
        print(overview())
        return 0
    if name == "--version":
        print(_versions())
        return 0
    if name == TASK_WORD and TASK_VARIABLE in os.environ:
        from trireme.cli.tasks.task import main

        return main(rest)
    if name.startswith("-"):
        close = suggestion(name, ("--help", "--version"))
        raise UsageError(f"there is no option {name}{close}; `trireme --help` lists them")
    status: int = COMMANDS.imported(name, "main")(rest)
    return status


def overview() -> str:
    """Returns the text of `trireme --help`."""
    names = COMMANDS.names()
    width = max(map(len, names))
    lines = [f"  {name:<{width}}  {_summary(name)}" for name in names]
    return "\n".join(
        [
            "usage: trireme COMMAND ...",
            "",
            "Trains a program that is written for one device; parallelism is configured at launch.",
            "",
            "commands:",
            *lines,
            "",
            "  trireme COMMAND --help shows the options; trireme --version shows the versions.",
            "",
            "exit status: 0 finished, 1 a task failed, 2 bad usage, 130 interrupted and saved, "
            "143 a worker that left",
        ]
    )


def _summary(name: str) -> str:
    try:
        return COMMANDS.load(name).summary
    except ConfigurationError as error:
        return f"({error})"


def _versions() -> str:
    from importlib.metadata import PackageNotFoundError, version

    from trireme.version import __version__

    try:
        torch = version("torch")
    except PackageNotFoundError:  # it was built by hand, or is missing
        torch = "of unknown version"
    return f"trireme {__version__}, torch {torch}, Python {platform.python_version()}"


def _complain(error: TriremeError, status: int) -> int:
    text = printable(" ".join(str(error).split()))
    print(f"trireme: error: {text}", file=sys.stderr)
    return status
