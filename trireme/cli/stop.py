"""`trireme stop RUN`: asks a job to save and end."""

from __future__ import annotations

import signal
import socket
from collections.abc import Sequence

from trireme.cli.parser import STOP
from trireme.cli.runs import ELSEWHERE, local_run, timeout_seconds
from trireme.errors import UsageError, WaitTimeout
from trireme.launch.run_directory import (
    is_running,
    read_record,
    signal_launcher,
    wait_until_free,
)
from trireme.location import local_directory
from trireme.printable import printable


def main(arguments: Sequence[str]) -> int:
    """Asks the job's launcher to stop the job, as Ctrl-C does, and waits until it has ended."""
    given = STOP.parser().read(arguments)
    timeout = timeout_seconds(given.timeout)
    with local_run(given.run) as path:
        record = read_record(path)
        running = is_running(path)
    if record.state == ELSEWHERE:
        raise UsageError(f"the job in {given.run} runs on {record.host}: stop it there")
    if not running:
        print(printable(f"the job in {given.run} does not run: {record.state}"))
        return 0
    path = local_directory(given.run)
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
