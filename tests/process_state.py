"""What a test may not leave behind in the process that it shares with others."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

SIGNALS = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP),
)
"""Not SIGCHLD, which torch's loaders handle from the first on, nor pytest-timeout's SIGALRM."""
SECONDS = 5.0
"""A thread or a process that ends so soon is none that was left behind."""
SHARED = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")
"""Python starts these for whoever needs them first, and keeps them."""


def _settings() -> dict[str, object]:
    found: dict[str, object] = {
        f"the handler of {each.name}": signal.getsignal(each)
        for each in SIGNALS
        if signal.getsignal(each) is not signal.SIG_IGN  # as in the background of a shell
    }
    found["the working directory"] = os.getcwd()
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch's number of threads"] = torch.get_num_threads()
        found["torch's default type"] = torch.get_default_dtype()
        found["torch's grad mode"] = torch.is_grad_enabled()
    return found


def _children() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").glob("*/children"):  # none where this is not Linux
        with suppress(OSError):
            found |= {int(pid) for pid in task.read_text().split()}
    return found


def _runs(pid: int) -> str:
    """Returns the command of a process, or nothing if it has ended or is shared."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
    return "" if any(each in command for each in SHARED) else command  # a zombie has none


@dataclass
class ProcessState:
    """The state before a test."""

    settings: dict[str, object] = field(default_factory=_settings)
    threads: frozenset[threading.Thread] = field(
        default_factory=lambda: frozenset(threading.enumerate())
    )
    children: set[int] = field(default_factory=_children)

    def changes(self) -> list[str]:
        """Returns what is not as it was, in words."""
        now = _settings()
        found = [
            f"{name} was {value} and is {now.get(name, 'ignored')}"
            for name, value in self.settings.items()
            if now.get(name) != value
        ]
        for thread in set(threading.enumerate()) - self.threads:
            if not thread.daemon:
                thread.join(SECONDS)
                if thread.is_alive():
                    found.append(f"the thread {thread.name} goes on")
        return found + self._left_running()

    def _left_running(self) -> list[str]:
        deadline = time.monotonic() + SECONDS
        while running := {pid: what for pid in _children() - self.children if (what := _runs(pid))}:
            if time.monotonic() > deadline:
                return [f"process {pid} goes on: {what}" for pid, what in running.items()]
            gc.collect()  # a loader ends its processes when nothing holds it any more
            time.sleep(0.05)
        return []
