"""Contenders' processes: started with one thread each, counted, and gone when we are."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from benchmarks.machine import ROOT

THREADS = {
    name: "1"
    for name in (
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "NUMEXPR_NUM_THREADS",
        "TF_NUM_INTRAOP_THREADS",
    )
}
"""One BLAS thread a process, for everyone."""

_NEVER_GIVEN = range(20_000, 32_000)
"""Ports that Linux and others give to nobody who does not ask for one of them."""
_system_random = random.SystemRandom()
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the environment of every contender."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
    own = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    return {**os.environ, **THREADS, **own, **(extra or {})}


def _tie() -> None:
    """In the child: dies with the process that started it."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Program:
    """A contender's process, with whatever it starts.

    Args:
        command: what to run.
        log: where its output goes.
        directory: in which it runs.
        extra: more of its environment.
        talk: keep pipes to its input and from its output; else there is no input, and the output
            goes to the log.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        directory: Path,
        extra: Mapping[str, str] | None = None,
        talk: bool = False,
    ) -> None:
        self.log = log
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                command,
                cwd=directory,
                env=environment(extra),
                stdin=subprocess.PIPE if talk else subprocess.DEVNULL,
                stdout=subprocess.PIPE if talk else file,
                stderr=file,
                text=talk,
                start_new_session=True,
                preexec_fn=_tie,
            )

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    def check(self) -> None:
        """Returns while it runs.

        Raises:
            RuntimeError: it has ended; shows the end of its log.
        """
        status = self.process.poll()
        if status is not None:
            raise RuntimeError(f"it ended with status {status}: {self.tail()}")

    def tail(self, lines: int = 5) -> str:
        """Returns the last lines of its log."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return " / ".join(line.strip() for line in text.splitlines()[-lines:])

    def kill(self) -> None:
        """Ends it and all that it started."""
        try:
            family = [*psutil.Process(self.pid).children(recursive=True), psutil.Process(self.pid)]
        except psutil.NoSuchProcess:
            family = []
        for process in family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait()
        psutil.wait_procs(family, timeout=5)


def cpu_seconds(pids: Iterable[int]) -> float:
    """Returns what processes and their descendants have used of the processors so far.

    To the nanosecond, of all threads. Processes that have ended meanwhile are not counted: to be
    asked while all of them run; NaN where one of `pids` does not.
    """
    total = 0.0
    for pid in pids:
        try:
            family = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
        except psutil.NoSuchProcess:
            return math.nan
        for one in family:
            with contextlib.suppress(OSError):  # a child may end at any time
                total += time.clock_gettime(_cpu_clock(one))
    return total


def _cpu_clock(pid: int) -> int:
    """Returns the clock of a process's processor time, as `clock_getcpuclockid` makes it."""
    return (~pid << 3) | 2


def free_ports(count: int) -> list[int]:
    """Returns ports of the loopback that are free now, for peers that cannot choose one.

    They are not of those that systems give to whoever connects: such a one may be taken before the
    peer, which has to start first, listens there. Nor does the seed of `random` choose them:
    processes that have seeded it alike would choose the same ports.
    """
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        for port in _system_random.sample(_NEVER_GIVEN, len(_NEVER_GIVEN)):
            if len(ports) == count:
                return ports
            with contextlib.suppress(OSError):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
                ports.append(port)
    raise OSError(f"there are not {count} free ports in {_NEVER_GIVEN}")
