"""A chief is stopped (SIGSTOP) until another worker has taken over, and then goes on.

No launcher kills it: the tasks are started by hand. So there are two live chiefs for a moment, and
the one that wakes must hear that it was given up, and take part again.
"""

from __future__ import annotations

import signal

import pytest

from benchmarks.processes import free_ports
from tests.attacks.test_leftover_worker import until_stopped
from tests.integration.shell import PROGRAMS, Running, Shell
from tests.integration.test_counting import saved, table, updates

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

STEPS = 900


@pytest.mark.slow
@pytest.mark.thorough
def test_a_chief_that_wakes_after_its_eviction_takes_part_again(shell: Shell) -> None:
    (port,) = free_ports(1)
    hosts = (f"--ps_hosts=127.0.0.1:{port}", "--worker_hosts=127.0.0.1:1,127.0.0.1:2")
    program = (PROGRAMS / "counting.py", "--out", "out", "--max-steps", STEPS, "--pause", 0.02)

    def task(role: str, index: int, *words: object) -> Running:
        name = (f"--job_name={role}", f"--task_index={index}", "--strategy=async")
        return shell.start("task", *name, *hosts, "--run-dir", "run", *words)

    server = task("ps", 0)
    server.until("listens on")
    chief = task("worker", 0, *program, "--fault", "0:9:in flight:hang")
    other = task("worker", 1, *program)
    until_stopped(chief, shell.directory / "out/fault-0-9")
    other.until(r"step 600 ")  # 12 seconds at least: a task is given up after 10
    chief.send(signal.SIGCONT)
    chief.until("this worker was taken for lost and comes back")
    for running in (chief, other, server):
        ended = running.ended()
        assert ended.status == 0, ended.text
    data = saved(shell, STEPS)
    assert updates(data) == [table(data)[0], table(data)[1]]
    assert sum(updates(data)) == STEPS
