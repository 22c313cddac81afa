"""`trireme completion SHELL`: the script by which a shell completes `trireme` commands."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from trireme.cli.command import COMMANDS, Parser
from trireme.cli.parser import COMPLETION, SHELLS
from trireme.cluster.spec import ROLES
from trireme.errors import UsageError, suggestion
from trireme.job_config import CODECS
from trireme.launch.engines import ENGINES, all_options

_PROGRAM = ("run", "task", "graph")
"""The commands that take a program."""

_WORDS: Mapping[tuple[str, str], Sequence[str]] = {
    ("task", "job_name"): ROLES,
    ("task", "sync_replicas"): ("true", "false"),
    ("checkpoint", "action"): ("ls", "show", "verify", "export"),
    ("certs", "task"): ("coordinator:0", "ps:0", "ps:1", "worker:0", "worker:1"),
    ("completion", "shell"): SHELLS,
}
"""The words that an argument of a command takes, or some of them, by command and argument."""

_RUNS = {"bash": "_trireme_run_dirs", "zsh": "_trireme_run_dirs", "fish": "(_trireme_run_dirs)"}
"""The functions that list run directories, which the preambles define.

By the `_dir` in its name shtab's script for bash knows that they are paths: `/` follows, no space.
"""

_PREAMBLE = {
    "bash": """
# Run directories: what holds a job.json, at most three directories down; else any directory.
_trireme_run_dirs() {
  local file found=()
  for file in {,*/,*/*/}*/job.json; do
    [[ -e $file && ${file%/job.json} == "$1"* ]] && found+=("${file%/job.json}")
  done
  if ((${#found[@]})); then printf '%s\\n' "${found[@]}"; else compgen -d -- "$1"; fi
}
""",
    "zsh": """
# Run directories: what holds a job.json, at most three directories down; else any directory.
_trireme_run_dirs() {
  local -a found
  found=( */job.json(N:h) */*/job.json(N:h) */*/*/job.json(N:h) )
  if (( $#found )); then compadd -f -- $found || _files -/; else _files -/; fi
}
""",
    "fish": """
# Run directories: what holds a job.json, at most three directories down; else any directory.
function _trireme_run_dirs
  set -l found */job.json */*/job.json */*/*/job.json
  if test (count $found) -gt 0
    string replace -r '/job.json$' '' -- $found
  else
    __fish_complete_directories (commandline -ct)
  end
end
""",
}


def main(arguments: Sequence[str]) -> int:
    """Prints the script and returns 0."""
    given = COMPLETION.parser().read(arguments)
    if given.shell not in SHELLS:
        raise UsageError(
            f"there is no completion for {given.shell}{suggestion(given.shell, SHELLS)}; the "
            f"shells are: {', '.join(SHELLS)}"
        )
    print(script(given.shell))
    return 0


def script(shell: str) -> str:
    """Returns the script for a shell, one of `SHELLS`."""
    import shtab  # only this command needs it

    # Its annotation says a string; its documentation, and its code, one for each shell.
    preamble: Any = _PREAMBLE
    text: str = shtab.complete(_whole_parser(), shell=shell, preamble=preamble)
    return text


def _whole_parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(prog="trireme", description="Trains on many processes")
    whole.add_argument("--version", action="store_true", help="show the versions")
    commands = whole.add_subparsers(dest="command")
    for name, command in COMMANDS.all().items():
        parser = command.parser()
        _describe(name, parser)
        added = commands.add_parser(name, help=command.summary, parents=[parser], add_help=False)
        if name in _PROGRAM:
            _completed(added.add_argument("SCRIPT", nargs="?", help="the program"), "file")
            _completed(added.add_argument("ARGS", nargs="*", help="its arguments"), "file")
    return whole


def _describe(command: str, parser: Parser) -> None:
    """Has each argument of a command completed by what it takes."""
    choices: dict[str, Sequence[str]] = {o.field: _literals(o.type) for o in all_options()}
    choices |= {o.field: o.values() for o in all_options() if o.values is not None}
    choices |= {"compress": CODECS, "on": ENGINES.names()}
    for action in parser.arguments:
        words = _WORDS.get((command, action.dest)) or choices.get(action.dest)
        metavar = str(action.metavar)
        if words and action.nargs != 0:
            action.choices = list(words)
        elif metavar == "RUN" or action.dest == "run_dir":
            _completed(action, _RUNS)
        elif metavar in ("DIR", "FILE", "PATH", "WHERE"):
            _completed(action, "directory" if metavar == "DIR" else "file")


def _completed(action: argparse.Action, by: str | Mapping[str, str]) -> None:
    """Has an argument completed by files, by directories, or by a function of each shell."""
    import shtab

    kinds = {"file": shtab.FILE, "directory": shtab.DIRECTORY}
    action.complete = kinds[by] if isinstance(by, str) else by  # type: ignore[attr-defined]


def _literals(kind: Any) -> list[str]:
    """Returns the words of the `Literal` that a type is, or that is a part of it."""
    if isinstance(kind, str):
        return [kind]
    return [word for part in get_args(kind) for word in _literals(part)]
