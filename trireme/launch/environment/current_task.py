"""The task that this process is, for the program that runs in it.

`trireme` tells the processes that it starts which task they are, and reports their failures. A
process of another launcher reports its own failure, in one line, because many processes write to
one terminal.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType

from trireme.cluster.spec import is_loopback
from trireme.errors import TriremeError, UsageError
from trireme.launch.config.task_config import TASK_VARIABLE, TaskConfig
from trireme.launch.environment.detect import detect
from trireme.launch.environment.loopback import stay_on_loopback
from trireme.launch.environment.process_launchers import LAUNCHER_VARIABLES, RANK_VARIABLES
from trireme.launch.environment.tf_config import TF_VARIABLE

__all__ = ["current_task"]


def current_task() -> TaskConfig:
    """Returns the task that this process is.

    In a process that `TF_CONFIG` names as a parameter server this function does not return: the
    process becomes that server.

    Raises:
        UsageError: the environment describes no task.
    """
    if TASK_VARIABLE not in os.environ and _started_by_another_launcher():
        sys.excepthook = _print_error
    task = detect()
    if task.role != "worker":
        # TensorFlow's programs wait in `server.join()` here. A server runs none of this program.
        sys.stdout.flush()
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, "-m", "trireme", "task"])
    if task.processes > 1 and (task.one_host or is_loopback(task.process_group)):
        stay_on_loopback(os.environ)
    return task


def _started_by_another_launcher() -> bool:
    return any(os.environ.get(name) for name in (*LAUNCHER_VARIABLES, TF_VARIABLE))


def _print_error(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Replaces `sys.excepthook`: prints one of Trireme's errors as one line, then exits."""
    if not isinstance(error, TriremeError):
        sys.__excepthook__(kind, error, trace)
        return
    rank = next((os.environ[name] for name in RANK_VARIABLES if os.environ.get(name)), "")
    prefix = f"rank {rank}: " if rank.isdecimal() else ""
    # Not sys.stderr: torch.distributed wraps this hook, and drops what it prints when it exits.
    print(f"{prefix}error: {' '.join(str(error).split())}", file=sys.__stderr__, flush=True)
    raise SystemExit(2 if isinstance(error, UsageError) else 1)
