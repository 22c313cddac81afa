"""Ends what a launcher's tasks have started, should the launcher be killed.

The kernel ends a task with its launcher (`tether.py`), but not the task's own children. So a small
process waits beside the launcher. When the launcher is gone without a word, it ends every process
that has the launch's mark in its environment, which children inherit from their parents, whatever
session or process group they have moved to. Jenkins finds the children of a build in the same way.

This file is also that process's program: it needs nothing but Python's own library.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator

__all__ = ["GUARD_VARIABLE", "Guard"]

GUARD_VARIABLE = "TRIREME_LAUNCH"
DONE = b"."
LOOKS = 2
PAUSE = 0.05
LONGEST = 10.0
FAREWELL = 5.0


class Guard:
    """The process that waits beside a launcher. To be used as a context manager.

    Attributes:
        variables: what every task must have in its environment.
    """

    def __init__(self) -> None:
        mark = uuid.uuid4().hex
        self.variables = {GUARD_VARIABLE: mark}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, mark],
            stdin=subprocess.PIPE,  # ends when this process does, whatever ends it
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={},
            start_new_session=True,
        )

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Sends the guard away: this launcher has ended its tasks itself. May be repeated."""
        pipe = self._process.stdin
        assert pipe is not None  # asked for by PIPE
        if not pipe.closed:
            with contextlib.suppress(OSError):
                os.write(pipe.fileno(), DONE)
            pipe.close()
        try:
            self._process.wait(FAREWELL)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _end_all(mark: str) -> None:
    """Kills every process with the mark, until there is none in two looks one after the other."""
    deadline = time.monotonic() + LONGEST
    quiet = 0
    while quiet < LOOKS and time.monotonic() < deadline:
        found = list(_marked(f"{GUARD_VARIABLE}={mark}".encode()))
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        quiet = 0 if found else quiet + 1
        time.sleep(PAUSE)


def _marked(variable: bytes) -> Iterator[int]:
    """Returns the processes of this user that were started with a variable."""
    if not os.path.isdir("/proc/self"):
        return
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
            if variable in file.read().split(b"\0"):
                yield int(name)


def _main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if os.read(0, 1) != DONE:
        _end_all(sys.argv[1])


if __name__ == "__main__":
    _main()
