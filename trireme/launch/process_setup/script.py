"""Runs the user's program as `python` would, and reports how it failed."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from trireme.errors import JobFailed, TriremeError, UsageError
from trireme.launch.exit_reason import INTERRUPTED, describe
from trireme.launch.process_setup.program_end import program_failed
from trireme.launch.task_messages import LauncherPipe

__all__ = ["check_script", "run_script"]


def check_script(script: str) -> Path:
    """Returns the path of a program that exists and can be read.

    Raises:
        UsageError: it does not exist, or cannot be read.
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
    script: Path, arguments: Sequence[str], *, task: str = "", launcher: LauncherPipe | None = None
) -> int:
    """Runs a program as `__main__` in this process and returns its exit status.

    An exception of the program is printed on standard error: one of Trireme's errors as one line,
    any other with its traceback, without the launcher's frames.

    Args:
        script: the program.
        arguments: the program's `sys.argv` after its own name.
        task: the name to print before an error, such as `worker:1`.
        launcher: the pipe for the reason of a failure; None where no launcher hears of it.

    Returns:
        0 if the program ends by itself; the status that it passes to `sys.exit`; 130 after a
        KeyboardInterrupt; 2 after a UsageError; 1 after any other exception.
    """
    sys.argv = [str(script), *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = str(script.resolve().parent)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as error:
        return _exited(error, launcher)
    except KeyboardInterrupt as error:
        program_failed(error)
        return INTERRUPTED
    except BaseException as error:
        return _failed(error, task, launcher)
    return 0


def _exited(error: SystemExit, launcher: LauncherPipe | None) -> int:
    if error.code is None or error.code == 0:
        return 0
    status = error.code if isinstance(error.code, int) else 1
    if not isinstance(error.code, int):
        print(error.code, file=sys.stderr)
    if status != INTERRUPTED:
        program_failed(error)
        if launcher is not None:
            launcher.send(describe(error))
    return status


def _failed(error: BaseException, task: str, launcher: LauncherPipe | None) -> int:
    own = _without_launcher(error.__traceback__)
    program_failed(error)
    if launcher is not None and isinstance(error, JobFailed):
        print("ends: the job failed elsewhere", file=sys.stderr)  # the launcher reports where
    elif isinstance(error, TriremeError):
        print(f"{task}: error: {error}" if task else f"error: {error}", file=sys.stderr)
    else:
        traceback.print_exception(type(error), error, own)
    if launcher is not None:
        launcher.send(describe(error, _location(own)))
    return 2 if isinstance(error, UsageError) else 1


def _without_launcher(frames: TracebackType | None) -> TracebackType | None:
    """Drops this file's and runpy's frames from the top of a traceback."""
    while frames is not None:
        name = frames.tb_frame.f_code.co_filename
        if name != __file__ and "runpy" not in name:
            break
        frames = frames.tb_next
    return frames


def _location(frames: TracebackType | None) -> str:
    """Returns file and line of the innermost frame in the program itself; "" if there is none."""
    location = ""
    first = frames.tb_frame.f_code.co_filename if frames is not None else ""
    while frames is not None:
        if frames.tb_frame.f_code.co_filename == first:
            location = f"{os.path.basename(first)}:{frames.tb_lineno}"
        frames = frames.tb_next
    return location
