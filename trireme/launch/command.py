"""The command line that starts one task, and the files that it writes for its launcher."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trireme.launch.config.task_config import TaskConfig

__all__ = ["LOOPBACK", "CommandBuilder", "TaskFiles", "task_command"]

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class TaskFiles:
    """The files that a task writes for its launcher.

    Attributes:
        address: the address at which the task listens.
        exit_reason: why it failed.
        membership_report: of a coordinator, the members of the job.
    """

    address: Path
    exit_reason: Path
    membership_report: Path


CommandBuilder = Callable[[TaskConfig, TaskFiles, Sequence[str]], Sequence[str]]


def task_command(
    config: TaskConfig, files: TaskFiles, program: Sequence[str], *, host: str = LOOPBACK
) -> list[str]:
    """Returns the command line of a child of this process that runs a task.

    Everything else that the task has to know is in its environment.

    Args:
        config: the task.
        files: the files that it writes for its launcher.
        program: the user's program and its arguments.
        host: the address of this machine at which a server or coordinator listens.
    """
    command = [
        *(sys.executable, "-m", "trireme", "task"),
        *("--job-name", config.role, "--task-index", str(config.index)),
        *("--tied-to", str(os.getpid()), "--outcome-file", str(files.exit_reason)),
    ]
    if config.role == "worker":
        return [*command, *program]
    if host != LOOPBACK:
        command += ["--listen-host", host]
    if config.role == "coordinator":
        command += ["--address-file", str(files.address)]
        command += ["--attendance-file", str(files.membership_report)]
    return command
