"""Runs the user's program as `python` would, and tells how it failed and whether it ends by that.

A program is a script, or a module after `-m`, with its arguments.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from types import TracebackType

import msgspec

from trireme.errors import JobFailed, TriremeError, UsageError
from trireme.launch.exit_reason import INTERRUPTED, LEFT, LauncherPipe, describe
from trireme.printable import printable

MODULE = "-m"  # the word before the name of a module
_TRACEBACK_LENGTH = 1 << 15
_PACKAGE = str(Path(__file__).parents[2]) + os.sep


def check_program(program: Sequence[str]) -> None:
    """Checks that a program exists, without importing anything of it."""
    if program[0] != MODULE:
        check_script(program[0])
        return
    if len(program) < 2:
        raise UsageError("name a module after -m, such as -m package.train")
    first = program[1].partition(".")[0]
    here = first.isidentifier() and PathFinder.find_spec(first, [os.getcwd()])
    if not here and (not first.isidentifier() or importlib.util.find_spec(first) is None):
        raise UsageError(
            f"there is no module {program[1]} (looked from {os.getcwd()} and in what is "
            "installed); give its name with dots and without .py"
        )


def program_name(program: Sequence[str]) -> str:
    """Returns a short name of a program, after which its run directory is called."""
    if program[0] != MODULE:
        return Path(program[0]).stem
    parts = [part for part in program[1].split(".") if part != "__main__"]
    return parts[-1] if parts else "main"


def run_program(
    program: Sequence[str], *, task: str = "", launcher: LauncherPipe | None = None
) -> int:
    """Runs a script, or a module as `python -m` does, as `__main__`; see `run_body`."""
    check_program(program)
    first, *arguments = program
    if first == MODULE:
        first, *arguments = arguments
        place = os.getcwd()
        body = partial(runpy.run_module, first, run_name="__main__", alter_sys=True)
    else:
        place = str(Path(first).resolve().parent)
        body = partial(runpy.run_path, first, run_name="__main__")
    sys.argv = [first, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = place
    return run_body(body, task=task, launcher=launcher)


def check_script(script: str) -> Path:
    """Returns the path of a program that exists and can be read."""
    path = Path(script)
    if path.is_dir():
        raise UsageError(f"{script} is a directory, not a program")
    if not path.is_file():
        raise UsageError(f"there is no program {script} (looked from {os.getcwd()})")
    if not os.access(path, os.R_OK):
        raise UsageError(f"the program {script} cannot be read: see its permissions")
    return path


def run_body(
    body: Callable[[], object], *, task: str = "", launcher: LauncherPipe | None = None
) -> int:
    """Runs a program that is there already, and returns its exit status.

    An exception is printed on standard error, after the task's name: one of Trireme's errors as one
    line, any other with its traceback, without the launcher's frames. The status is that of
    `sys.exit`; 130 after a KeyboardInterrupt, 2 after a UsageError, 1 after another exception.
    """
    try:
        body()
        _explained(None)
    except SystemExit as error:
        return _exited(error, launcher)
    except KeyboardInterrupt as error:
        FAILED.append(error)
        return INTERRUPTED
    except BaseException as error:
        return report_failure(_explained(error) or error, task, launcher)
    return 0


def _explained(error: BaseException | None) -> BaseException | None:
    known = (explain(error) for explain in [*EXPLAIN])
    return next((found for found in known if found is not None), None)


def _exited(error: SystemExit, launcher: LauncherPipe | None) -> int:
    if error.code is None or error.code == 0:
        return 0
    status = error.code if isinstance(error.code, int) else 1
    if not isinstance(error.code, int):
        print(error.code, file=sys.stderr)
    if status not in (INTERRUPTED, LEFT):
        FAILED.append(error)
        if launcher is not None:
            launcher.send(describe(error))
    return status


def report_failure(error: BaseException, task: str, launcher: LauncherPipe | None) -> int:
    """Tells how the program has failed, and returns its exit status; see `run_body`."""
    own = _without_launcher(error.__traceback__)
    FAILED.append(error)
    if launcher is not None and isinstance(error, JobFailed):
        print("ends: the job is over; the launcher says how", file=sys.stderr)
    elif isinstance(error, TriremeError):
        text = printable(str(error), keep="\n")
        print(f"{task}: error: {text}" if task else f"error: {text}", file=sys.stderr)
    else:
        traceback.print_exception(type(error), error, own)
    if launcher is not None:
        reason = describe(error, _location(own))
        text = ""
        if reason.kind == "exception":
            text = "".join(traceback.format_exception(type(error), error, own))
        elif reason.kind != "victim":  # the message says what; the lines of the program say where
            frames = [each for each in traceback.extract_tb(own) if not _is_ours(each.filename)]
            text = "".join(traceback.format_list(frames))
        text = printable(text[-_TRACEBACK_LENGTH:], keep="\n")
        launcher.send(msgspec.structs.replace(reason, traceback=text))
    return 2 if isinstance(error, UsageError) else 1


def _without_launcher(frames: TracebackType | None) -> TracebackType | None:
    while frames is not None:
        name = frames.tb_frame.f_code.co_filename
        if not _is_ours(name) and "runpy" not in name:
            break
        frames = frames.tb_next
    return frames


def _is_ours(file: str) -> bool:
    return file.startswith(_PACKAGE)


def _location(frames: TracebackType | None) -> str:
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(frames)]
    lines = [line for name, line in places if name == places[0][0]]
    return f"{os.path.basename(places[0][0])}:{lines[-1]}" if lines else ""


FAILED: list[BaseException] = []  # what ended this process's program

EXPLAIN: list[Callable[[BaseException | None], BaseException | None]] = []
"""Functions that return the error behind one that has ended this program; None if it says all.
Where the program has ended well they are called with None, and may raise."""
