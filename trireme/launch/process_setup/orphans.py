"""Lets nothing outlive a launcher that is killed: neither its tasks nor what they have started.

The kernel kills a task with its launcher (`end_with_parent`), but not the task's own children. So
a process waits beside the launcher: the template of its tasks, where it has one, else a small one,
the reaper. When the launcher dies without closing it, it kills every process that has the launch's
id in its environment (`end_all`), which children inherit into any session, as Jenkins does.

This file is also the reaper's program. It needs only Python's standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

LAUNCH_VARIABLE = "TRIREME_LAUNCH"
DONE = b"."
QUIET_SCANS = 2
SCAN_SECONDS = 0.05
TOTAL_SECONDS = 10.0
CLOSE_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Has the kernel kill this process as soon as its parent dies.

    The child calls it itself, before anything else, because the launcher must not run code between
    fork and exec. On other systems than Linux it only checks that the parent lives.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            error = ctypes.get_errno()
            raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    # If the parent died before the call, this process has another parent by now.
    if os.getppid() != parent:
        raise SystemExit(
            f"process {parent} is not the parent of this task: it has ended, or the command that "
            "starts the task forks: it must exec"
        )


class OrphanReaper:
    """The process that waits beside a launcher, until it is closed."""

    def __init__(self, launch_id: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, launch_id],
            stdin=subprocess.PIPE,  # closes when this process ends, for whatever reason
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={},
            start_new_session=True,
        )

    def close(self) -> None:
        """Ends the reaper, as it is needed no more. May be repeated."""
        pipe = self._process.stdin
        assert pipe is not None  # asked for by PIPE
        if not pipe.closed:
            with contextlib.suppress(OSError):
                os.write(pipe.fileno(), DONE)
            pipe.close()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def end_all(launch_id: str) -> None:
    """Kills every other process with a launch's id, until two scans in a row find none."""
    deadline = time.monotonic() + TOTAL_SECONDS
    quiet = 0
    while quiet < QUIET_SCANS and time.monotonic() < deadline:
        marked = _processes_with(f"{LAUNCH_VARIABLE}={launch_id}".encode())
        found = [pid for pid in marked if pid != os.getpid()]
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        quiet = 0 if found else quiet + 1
        time.sleep(SCAN_SECONDS)


def _processes_with(variable: bytes) -> Iterator[int]:
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
        end_all(sys.argv[1])


if __name__ == "__main__":
    _main()
