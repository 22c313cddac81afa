"""The aggregator of a host in a job of processes: what counts, whoever is killed.

The program is `programs/counting.py`: the values count the updates of each worker.
"""

from __future__ import annotations

import re

import pytest

from tests.integration.shell import Ended, Shell
from tests.integration.test_counting import (
    BATCH,
    consumed,
    count,
    notes,
    saved,
    table,
    updates,
)

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

HOST = ("--ps", 1, "--strategy", "sync", "--host-aggregator")


def sums(ended: Ended) -> tuple[int, int]:
    """How many updates the aggregator says it has sent, in how many sums."""
    found = re.search(r"(\d+) updates went to the server in (\d+) sums", ended.text)
    assert found is not None, ended.text
    return int(found[1]), int(found[2])


def test_all_updates_of_a_host_go_as_one_sum_a_step(shell: Shell) -> None:
    steps, workers = 30, 4
    ended = count(shell, steps, *HOST, "--workers", workers)
    assert sums(ended) == (steps * workers, steps)
    data = saved(shell, steps)
    assert updates(data) == [steps / workers] * workers
    assert table(data) == dict.fromkeys(range(workers), steps)
    assert consumed(data) == [[0, steps * workers * BATCH]]


def test_nothing_counts_twice_when_the_aggregator_is_killed(shell: Shell) -> None:
    """It dies with the updates of some workers in hand, or in a sum that was not answered."""
    steps, workers = 30, 4
    faults = ("2:10:in flight:kill aggregator",)
    ended = count(shell, steps, *HOST, "--workers", workers, faults=faults)
    words = "WARNING: aggregator:0 was killed by SIGKILL; the workers push by themselves"
    assert words in ended.err
    data = saved(shell, steps)
    assert updates(data) == [steps / workers] * workers
    assert table(data) == dict.fromkeys(range(workers), steps)
    for worker in range(workers):
        assert notes(shell, worker) == {"attempted": steps, "applied": steps}
    assert consumed(data) == [[0, steps * workers * BATCH]]


@pytest.mark.parametrize("moment", ["before", "in flight"])
def test_a_host_goes_on_without_a_killed_worker(shell: Shell, moment: str) -> None:
    """Worker 1 dies without an update, or with one in the aggregator's hands or in a sum."""
    steps, together = 30, 5
    ended = count(shell, steps, *HOST, "--workers", 2, faults=(f"1:{together + 1}:{moment}:kill",))
    assert "worker:1 was killed by SIGKILL; the job goes on with the 1 left" in ended.err
    data, first, second = saved(shell, steps), notes(shell, 0), notes(shell, 1)
    known = table(data)
    assert first == {"attempted": steps, "applied": steps} and known[0] == steps
    assert second["applied"] == together
    # Of the one that was under way nobody but the server knows what became.
    assert known[1] in (second["applied"], second["attempted"])
    # Halves while there were two in a round.
    assert updates(data) == [steps - known[1] / 2, known[1] / 2]
    assert sum(stop - start for start, stop in consumed(data)) == sum(known.values()) * BATCH


def test_a_worker_that_is_started_again_hands_its_updates_to_the_aggregator_again(
    shell: Shell,
) -> None:
    steps = 40
    ended = count(
        shell,
        steps,
        *(*HOST, "--workers", 2, "--max-restarts", 1),
        faults=("1:6:in flight:kill",),
        attempts=7,  # in a round of both it cannot get further ahead of worker 0
    )
    assert ended.err.count("worker:1 failed: killed by SIGKILL; started again") == 1
    data, first, second = saved(shell, steps), notes(shell, 0), notes(shell, 1)
    known = table(data)
    assert known[0] == first["applied"] and known[1] in (second["applied"], second["attempted"])
    assert sum(updates(data)) == steps
    went, how_often = sums(ended)
    assert went > how_often
    assert sum(stop - start for start, stop in consumed(data)) == sum(known.values()) * BATCH


def test_what_cannot_be_summed_is_refused_at_the_command_line(shell: Shell) -> None:
    ended = shell.run("run", "--ps", 2, "--workers", 2, "--strategy", "sync", "--host-aggregator",
                      "x.py")  # fmt: skip
    assert ended.status == 2
    assert "use --ps 1, or leave --host-aggregator out" in ended.text
