"""How one task is started: its command line, what it inherits, the files that it writes."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trireme.launch.config.secret import secret_descriptor
from trireme.launch.config.task_config import TaskConfig

__all__ = ["LOOPBACK", "CommandBuilder", "TaskFiles", "inherited", "task_command"]

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


@contextlib.contextmanager
def inherited(config: TaskConfig, host: str = LOOPBACK) -> Iterator[tuple[TaskConfig, list[int]]]:
    """Gives the descriptors that a task inherits, and its configuration, which names them.

    One holds its secret. For rank 0 of a process group another one listens, so that no other
    process can take the port at which the group meets.

    Args:
        config: the task.
        host: the address of this machine at which a process group meets.
    """
    fds = []
    with contextlib.ExitStack() as stack:
        if config.group is not None and config.rank == 0:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            address = (host.strip("[]"), 0)
            listener = stack.enter_context(socket.create_server(address, family=family))
            fds.append(listener.fileno())
            config = msgspec.structs.replace(
                config,
                process_group=f"{host}:{listener.getsockname()[1]}",
                process_group_fd=listener.fileno(),
            )
        secret = stack.enter_context(secret_descriptor(config.secret, config.job))
        if secret is not None:
            fds.append(secret)
            config = msgspec.structs.replace(config, secret="", secret_fd=secret)
        yield config, fds
