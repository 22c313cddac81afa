"""`ps:0` of a job by hand has the coordinator: it is killed, and started again with its journal."""

from __future__ import annotations

import signal

import pytest

from benchmarks.processes import free_ports
from tests.integration.shell import PROGRAMS, Running, Shell
from tests.integration.test_lost_servers import BATCH, counts, release, until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

STEPS = 400
COUNTING = (
    *(PROGRAMS / "counting.py", "--out", "out", "--max-steps", STEPS, "--batch-size", BATCH),
    *("--pause", 0.01, "--pause-until", "released"),
)


class Job:
    """Tasks that are started by hand.

    Args:
        shell: where.
        servers: how many there are, each on a port of its own.
        words: options of all tasks.
    """

    def __init__(self, shell: Shell, servers: int, *words: object) -> None:
        self._shell = shell
        ports = ",".join(f"127.0.0.1:{port}" for port in free_ports(servers))
        hosts = f"--ps_hosts={ports}", "--worker_hosts=127.0.0.1:1,127.0.0.1:2"
        self._words = (*hosts, "--run-dir", "run", "--strategy", "async", *words)

    def server(self, index: int) -> Running:
        """Starts a server; server 0 with its journal."""
        journal = ("--journal", "journal.sqlite") if index == 0 else ()
        return self._start("ps", index, *journal)

    def worker(self, index: int) -> Running:
        """Starts a worker."""
        return self._start("worker", index, *COUNTING)

    def _start(self, role: str, index: int, *words: object) -> Running:
        task = f"--job_name={role}", f"--task_index={index}"
        return self._shell.start("task", *task, *self._words, *words)


@pytest.mark.slow
@pytest.mark.thorough
def test_without_replicas_every_task_hears_soon_that_the_values_are_lost(shell: Shell) -> None:
    job = Job(shell, 1)
    server, workers = job.server(0), [job.worker(index) for index in range(2)]
    until(shell, 30)
    server.send(signal.SIGKILL)
    server.ended()
    again = job.server(0).ended(60)
    ends = [worker.ended(60) for worker in workers]
    for ended in (again, *ends):
        assert ended.status not in (0, None), ended.text
        assert "was lost: pid " in ended.text, ended.text
        assert "Traceback" not in ended.text


@pytest.mark.slow
@pytest.mark.thorough
def test_with_replicas_training_goes_on_and_no_update_is_lost(shell: Shell) -> None:
    job = Job(shell, 2, "--replicas", 2)
    servers = [job.server(index) for index in range(2)]
    workers = [job.worker(index) for index in range(2)]
    until(shell, 30)
    servers[0].send(signal.SIGKILL)
    servers[0].ended()
    servers[0] = job.server(0)
    until(shell, 90)
    release(shell)
    for running in (*workers, *servers):
        ended = running.ended()
        assert ended.status == 0, ended.text
    counts(shell, ended, STEPS)


@pytest.mark.slow
def test_where_all_copies_of_a_part_are_lost_the_others_go_back(shell: Shell) -> None:
    """No launcher sees a process end, so the last copy is waited for: workers wait for longer."""
    job = Job(shell, 3, "--replicas", 2)
    servers = [job.server(index) for index in range(3)]
    workers = [job.worker(index) for index in range(2)]
    until(shell, 30)
    for server in servers[1:]:
        server.send(signal.SIGKILL)
    until(shell, 90)
    release(shell)
    for running in (servers[0], *workers):
        ended = running.ended()
        assert ended.status == 0, ended.text
    assert "all copies of a part of the parameters were lost: the job goes" in ended.text
