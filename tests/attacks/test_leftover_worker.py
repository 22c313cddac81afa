"""A worker that slept while all else was started again comes back: same addresses, same secret.

It is stopped with a push in flight, of which it has heard nothing. What it says then must not be
taken for the words of the worker that has its name now.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil
import pytest

from benchmarks.processes import free_ports
from tests.integration.shell import Running, Shell

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

PROGRAM = Path(__file__).parent / "programs/until_told.py"


def until_stopped(running: Running, note: Path) -> None:
    """Waits until a worker has stopped itself: it makes the note just before."""
    running.until_there(note)
    process = psutil.Process(running.pid)
    while process.status() != psutil.STATUS_STOPPED:
        assert running.process.poll() is None


@pytest.mark.slow
@pytest.mark.thorough
def test_a_leftover_worker_is_told_and_its_pushes_count_nowhere(shell: Shell) -> None:
    (port,) = free_ports(1)
    hosts = (f"--ps_hosts=127.0.0.1:{port}", "--worker_hosts=127.0.0.1:1", "--strategy=async")

    def task(role: str, *words: object) -> Running:
        return shell.start("task", f"--job_name={role}", "--task_index=0", *hosts, *words)

    for start in ("first", "second"):
        (shell.directory / start).mkdir()
    first_server = task("ps")
    first_server.until("listens on")
    leftover = task("worker", PROGRAM, "first", 20)
    until_stopped(leftover, shell.directory / "first/fault-0-20")
    first_server.send(signal.SIGKILL)
    first_server.ended()

    server = task("ps")
    server.until("listens on")
    worker = task("worker", PROGRAM, "second")
    worker.until(r"step 30 ")  # beyond what the leftover knows of

    leftover.send(signal.SIGCONT)
    told = leftover.ended()
    assert told.status == 1, told.text
    assert "worker:0 belongs to an earlier start of job by-hand" in told.err
    assert told.err.count("error: ") == 1, told.err

    (shell.directory / "second/enough").touch()
    ended = worker.ended()
    assert ended.status == 0, ended.text
    report = json.loads((shell.directory / "second/report.json").read_text())
    assert report["applied"] == list(range(1, report["pushes"] + 1))
    assert report["global_step"] == report["pushes"]
    assert server.ended().status == 0
