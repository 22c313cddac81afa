"""Keeps the processes of a `DataLoader` alive until their worker ends them.

Whoever signals all processes of a job, such as Slurm, systemd or a shell, signals these too. If
they ended before their worker has made its last step, the worker would fail.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import threading
from functools import wraps
from multiprocessing.util import register_after_fork
from typing import Any

_MODULE = "torch.utils.data._utils.worker"


def shield_loader_processes(owner: object) -> None:
    """Has loader processes of this process heed SIGTERM from it alone, while `owner` lives."""
    register_after_fork(owner, _shield)


def _shield(owner: object) -> None:
    target = getattr(multiprocessing.current_process(), "_target", None)
    if getattr(target, "__module__", "") != _MODULE:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Blocked, and not ignored: torch sets a handler later, and a loader ends by its parent's.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    _leave_programs_alone()
    threading.Thread(target=_end_with_worker, name="SIGTERM", daemon=True).start()


def _leave_programs_alone() -> None:
    """Lets the programs that a data set starts, such as a decoder, end by SIGTERM as usual.

    A program inherits the signals that are blocked in the thread that starts it. So none is while
    it starts, and a signal to all processes in this moment ends the loader process.
    """
    begin = subprocess.Popen.__init__

    @wraps(begin)
    def unblocked(self: subprocess.Popen[Any], *args: Any, **named: Any) -> None:
        before = signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        try:
            begin(self, *args, **named)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    subprocess.Popen.__init__ = unblocked  # type: ignore[method-assign]


def _end_with_worker() -> None:
    """Ends the process at a SIGTERM of its parent, as torch and `multiprocessing` send it."""
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != os.getppid():
        pass
    os._exit(0)
