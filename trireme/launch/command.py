"""The command line that starts one task, and the files by which it tells its launcher something."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trireme.launch.task_config import TaskConfig

__all__ = ["LOOPBACK", "CommandBuilder", "TaskFiles", "task_command"]

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class TaskFiles:
    """Where a task tells its launcher something.

    Attributes:
        address: at which it listens.
        outcome: why it failed.
        attendance: of a coordinator, who takes part in the job.
    """

    address: Path
    outcome: Path
    attendance: Path


CommandBuilder = Callable[[TaskConfig, TaskFiles, Sequence[str]], Sequence[str]]


def task_command(
    config: TaskConfig, files: TaskFiles, program: Sequence[str], *, host: str = LOOPBACK
) -> list[str]:
    """Returns the command line of a child of this process that is to be a task.

    What else it has to know is in its environment.

    Args:
        config: the task.
        files: where it tells something.
        program: the user's program and its arguments.
        host: the address of this machine at which a server or coordinator listens.
    """
    command = [
        *(sys.executable, "-m", "trireme", "task"),
        *("--job-name", config.role, "--task-index", str(config.index)),
        *("--tied-to", str(os.getpid()), "--outcome-file", str(files.outcome)),
    ]
    if config.role == "worker":
        return [*command, *program]
    if host != LOOPBACK:
        command += ["--listen-host", host]
    if config.role == "coordinator":
        command += ["--address-file", str(files.address)]
        command += ["--attendance-file", str(files.attendance)]
    return command
