"""Tasks of a job that are killed, stopped and continued from outside."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from trireme.errors import UsageError
from trireme.launch.run_directory import read_record

STARTED_BY = "TRIREME_LAUNCH"
"""The environment variable with which the system shows each process that a launcher has started, or
had forked."""
GONE_SECONDS = 10.0


class Tasks:
    """The processes of the job in a run directory.

    Args:
        run_dir: the run directory.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def process(self, name: str) -> psutil.Process | None:
        """Returns the process that is a task now; None if there is none."""
        with suppress(UsageError, KeyError, psutil.Error):
            process = psutil.Process(read_record(self._run_dir).pids[name])
            # A process id that was given to somebody else since is left alone.
            if STARTED_BY in process.environ() and process.status() != psutil.STATUS_ZOMBIE:
                return process
        return None

    def send(self, name: str, number: signal.Signals) -> bool:
        """Sends a signal to a task's process alone; returns whether there was one."""
        process = self.process(name)
        if process is None:
            return False
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            return False
        return True

    def kill(self, name: str) -> bool:
        """Kills a task by SIGKILL and waits until it is gone; returns whether it lived."""
        process = self.process(name)
        if process is None or not self.send(name, signal.SIGKILL):
            return False
        deadline = time.monotonic() + GONE_SECONDS
        while self.process(name) == process:
            assert time.monotonic() < deadline, f"{name} lives on after SIGKILL"
            time.sleep(0.002)
        return True

    @contextmanager
    def stopped(self, name: str) -> Iterator[psutil.Process | None]:
        """Stops a task by SIGSTOP while the block runs; it goes on unless it was killed since."""
        process = self.process(name)
        if process is not None:
            process.suspend()
        try:
            yield process
        finally:
            if process is not None:
                with suppress(psutil.NoSuchProcess):
                    process.resume()
