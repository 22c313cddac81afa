"""This process as its program finds it: which task it is, whoever started it.

What `trireme` starts is told by it what it is, and heard by it when it fails. What others start
tells its own failures, in one line each: many processes write to one terminal.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType

from trireme.cluster.spec import is_loopback
from trireme.errors import TriremeError, UsageError
from trireme.launch.detect import detect
from trireme.launch.loopback import stay_on_loopback
from trireme.launch.others import MARKS, RANKS
from trireme.launch.task_config import TASK_VARIABLE, TaskConfig
from trireme.launch.tf_config import TF_VARIABLE

__all__ = ["task_here"]


def task_here() -> TaskConfig:
    """Returns the task that this process is.

    A process that `TF_CONFIG` names as a parameter server does not return: it becomes one.

    Raises:
        UsageError: the environment describes no task.
    """
    if TASK_VARIABLE not in os.environ and _started_by_others():
        sys.excepthook = _tell
    task = detect()
    if task.role != "worker":
        # As TensorFlow's programs wait in `server.join()`; a server runs none of this program.
        sys.stdout.flush()
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, "-m", "trireme", "task"])
    if task.processes > 1 and (task.one_host or is_loopback(task.gang)):
        stay_on_loopback(os.environ)
    return task


def _started_by_others() -> bool:
    return any(os.environ.get(name) for name in (*MARKS, TF_VARIABLE))


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Stands in for `sys.excepthook`: an error of ours is one line and an exit status."""
    if not isinstance(error, TriremeError):
        sys.__excepthook__(kind, error, trace)
        return
    rank = next((os.environ[name] for name in RANKS if os.environ.get(name)), "")
    who = f"rank {rank}: " if rank.isdecimal() else ""
    # Not sys.stderr: torch.distributed wraps this hook, and drops what it says when it exits.
    print(f"{who}error: {' '.join(str(error).split())}", file=sys.__stderr__, flush=True)
    raise SystemExit(2 if isinstance(error, UsageError) else 1)
