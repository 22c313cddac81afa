"""Runs the user's program as `python` would, and says in one place how it failed."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from trireme.errors import JobFailed, TriremeError, UsageError
from trireme.launch.outcome import Outcome, describe, write_outcome
from trireme.launch.program_end import program_failed

__all__ = ["INTERRUPTED", "check_script", "run_script"]

INTERRUPTED = 130


def check_script(script: str) -> Path:
    """Returns the path of a program that is there and can be read.

    Raises:
        UsageError: it is not.
    """
    path = Path(script)
    if path.is_dir():
        raise UsageError(f"{script} is a directory, not a program")
    if not path.is_file():
        raise UsageError(f"there is no program {script} (looked from {os.getcwd()})")
    if not os.access(path, os.R_OK):
        raise UsageError(f"the program {script} cannot be read: see its permissions")
    return path


def run_script(
    script: Path, arguments: Sequence[str], *, task: str = "", outcome: Path | None = None
) -> int:
    """Runs a program as `__main__` in this process and returns its exit status.

    Whatever it raises is told on standard error, without the frames of the launcher: one of
    Trireme's errors as one line, anything else with its traceback.

    Args:
        script: the program.
        arguments: what it finds in `sys.argv` after its own name.
        task: what to name in front of an error, such as `worker:1`.
        outcome: where to leave the reason of a failure for the launcher.

    Returns:
        0; the status that the program gave `sys.exit`; 130 after a KeyboardInterrupt; 2 after a
        UsageError; 1 after any other exception.
    """
    sys.argv = [str(script), *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = str(script.resolve().parent)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as error:
        return _exited(error, outcome)
    except KeyboardInterrupt as error:
        program_failed(error)
        return INTERRUPTED
    except BaseException as error:
        return _failed(error, task, outcome)
    return 0


def _exited(error: SystemExit, outcome: Path | None) -> int:
    if error.code is None or error.code == 0:
        return 0
    status = error.code if isinstance(error.code, int) else 1
    if not isinstance(error.code, int):
        print(error.code, file=sys.stderr)
    if status != INTERRUPTED:
        program_failed(error)
        _leave(outcome, describe(error))
    return status


def _failed(error: BaseException, task: str, outcome: Path | None) -> int:
    own = _without_launcher(error.__traceback__)
    program_failed(error)
    if outcome is not None and isinstance(error, JobFailed):
        print("ends: the job failed elsewhere", file=sys.stderr)  # where, the launcher says
    elif isinstance(error, TriremeError):
        print(f"{task}: error: {error}" if task else f"error: {error}", file=sys.stderr)
    else:
        traceback.print_exception(type(error), error, own)
    _leave(outcome, describe(error, _place(own)))
    return 2 if isinstance(error, UsageError) else 1


def _leave(path: Path | None, outcome: Outcome) -> None:
    if path is not None:
        write_outcome(path, outcome)


def _without_launcher(frames: TracebackType | None) -> TracebackType | None:
    """Drops this file's and runpy's frames from the top of a traceback."""
    while frames is not None:
        name = frames.tb_frame.f_code.co_filename
        if name != __file__ and "runpy" not in name:
            break
        frames = frames.tb_next
    return frames


def _place(frames: TracebackType | None) -> str:
    """Returns file and line of the innermost frame in the program itself, if there is one."""
    place = ""
    first = frames.tb_frame.f_code.co_filename if frames is not None else ""
    while frames is not None:
        if frames.tb_frame.f_code.co_filename == first:
            place = f"{os.path.basename(first)}:{frames.tb_lineno}"
        frames = frames.tb_next
    return place
