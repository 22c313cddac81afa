"""`trireme stop RUN`: asks a job to save and end."""

from __future__ import annotations

import math
import os
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from trireme.cli.command import number
from trireme.control.entry import STOP
from trireme.errors import UsageError, WaitTimeout
from trireme.host import process_birth
from trireme.launch.run_directory import LOCK, RECORD, JobRecord, is_running, read_record
from trireme.location import local_directory
from trireme.printable import printable


def main(arguments: Sequence[str]) -> int:
    """Asks the job's launcher to stop the job, as Ctrl-C does, and waits until it has ended."""
    given = STOP.parser().read(arguments)
    timeout = timeout_seconds(given.timeout)
    path = local_directory(given.run)
    record = read_record(path)
    if not is_running(path):
        print(printable(f"the job in {given.run} does not run: {record.state}"))
        return 0
    if record.host != socket.gethostname():
        raise UsageError(f"the job in {path} runs on {record.host}: stop it there")
    signal_launcher(path, record, signal.SIGTERM)
    if not wait_until_free(path, timeout):
        raise WaitTimeout(
            f"the job in {path} did not end within {timeout:g} s: `kill {record.launcher}` once "
            "more ends it at once"
        )
    print(printable(f"the job in {path} has ended: {read_record(path).state}"))
    return 0


def timeout_seconds(timeout: str) -> float:
    """Returns the value of the option `--timeout`."""
    return number("--timeout", timeout, "a number of seconds", lambda n: 0 <= n < math.inf)


def wait_until_free(path: Path, timeout: float) -> bool:
    """Waits until no launcher holds the run directory; returns False after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while is_running(path):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def signal_launcher(path: Path, record: JobRecord, number: signal.Signals) -> None:
    """Sends a signal to the launcher of the job that runs in a run directory.

    `job.json` may be anybody's, or from another container of the same host name. So the process
    that it names counts only if it began when the file says and holds the directory's lock.
    """
    with suppress(OSError, OverflowError):  # it has ended, is another user's, or no process id
        if _signal_if_launcher(path, record, number):
            return
    if is_running(path):
        raise UsageError(
            f"a job runs in {path}, and process {record.launcher}, which {RECORD} there names as "
            f"its launcher, does not hold {LOCK}: the launcher is in another container or another "
            f"user's, or {RECORD} was changed. Stop the job where it was started, with Ctrl-C or "
            "`trireme stop`"
        )


def _signal_if_launcher(path: Path, record: JobRecord, number: signal.Signals) -> bool:
    pid, birth = record.launcher, record.launcher_birth
    if pid < 1:
        return False  # kill(2) takes 0 for a process group, and -1 for all processes
    if not hasattr(os, "pidfd_open"):  # not Linux: the lock's holder cannot be asked for
        if pid == 1 or not birth or process_birth(pid) != birth:
            return False
        os.kill(pid, number)
        return True
    process = os.pidfd_open(pid)  # from here on the id cannot become another process's
    try:
        if (birth and process_birth(pid) != birth) or not _holds_lock(pid, path / LOCK):
            return False
        signal.pidfd_send_signal(process, number)
        return True
    finally:
        os.close(process)


def _holds_lock(pid: int, path: Path) -> bool:
    try:
        own = path.stat()
        for opened in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # it has just been closed
                if os.path.samestat(opened.stat(), own):
                    info = Path(f"/proc/{pid}/fdinfo/{opened.name}").read_text()
                    if "FLOCK" in info:
                        return True
    except OSError:  # it has ended, or is another user's
        return False
    return False
