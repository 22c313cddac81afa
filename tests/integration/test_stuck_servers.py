"""A server whose loop is stuck is a lost one; a disk and a terminal do not stop a loop.

The program is `programs/counting.py`: the values count the updates of each worker.
"""

from __future__ import annotations

import os

import pytest

from benchmarks.processes import free_ports
from tests.faults.garbage import send_garbage
from tests.faults.processes import Tasks
from tests.faults.threads import CannotStop, stopped_thread
from tests.integration.shell import PROGRAMS, TRIREME, Shell
from tests.integration.test_counting import saved, updates
from tests.integration.test_lost_servers import counting, counts, release, until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


@pytest.mark.slow
def test_a_server_whose_loop_is_stuck_is_lost_though_its_heart_beats(shell: Shell) -> None:
    steps = 3000  # it is released before these are made
    words = ("--ps", 2, "--replicas", 2, "--workers", 2, "--heartbeat-timeout", 2)
    running = counting(shell, steps, *words, "--max-restarts", 2, pause=0.05)
    until(shell, 20)
    run_dir = shell.directory / "run"
    server = Tasks(run_dir).process("ps:1")
    assert server is not None
    try:
        with stopped_thread(server.pid):  # its main thread: the loop
            running.until(r"ps:1\b.*its service has done nothing for [23] s; its main", 60.0)
            until(shell, 120)  # the others go on
    except CannotStop as error:
        pytest.skip(f"NO LOOP IS STUCK: {error}")
    release(shell)
    counts(shell, running.ended(), steps)


@pytest.mark.thorough
def test_a_disk_that_hangs_stops_no_server(shell: Shell) -> None:
    """A pipe that nobody reads stands for it: opening it for writing does not return."""
    records = shell.directory / "run" / "records"
    records.mkdir(parents=True)
    os.mkfifo(records / "ps-0.jsonl")
    running = counting(shell, 30, "--ps", 1, "--workers", 1)
    release(shell)
    ended = running.ended()
    assert ended.status == 0, ended.text
    assert updates(saved(shell, 30)) == [30]


@pytest.mark.thorough
def test_a_terminal_that_takes_nothing_stops_no_server(shell: Shell) -> None:
    full = shell.directory / "full"
    os.mkfifo(full)
    reader = os.open(full, os.O_RDWR | os.O_NONBLOCK)
    try:
        while True:
            os.write(reader, b"x" * 4096)
    except BlockingIOError:
        pass
    (port,) = free_ports(1)
    hosts = (f"--ps_hosts=127.0.0.1:{port}", "--worker_hosts=127.0.0.1:1")
    command = ("sh", "-c", 'exec "$0" "$@" 2>full', *TRIREME)
    server = shell.start("task", "--job_name=ps", *hosts, command=command)
    server.until("ps:0 listens on ")
    send_garbage(port)  # of which it warns
    program = (PROGRAMS / "train.py", "--out", "out", "--max-steps", 30)
    worker = shell.start("task", "--job_name=worker", *hosts, *program)
    assert worker.ended().status == 0
    assert server.ended(60.0).status == 0
    os.close(reader)
