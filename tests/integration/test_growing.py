"""Models grow while servers and workers are killed: each update is in the values once.

The program is `programs/counting.py`: the rows count the updates of each worker, and those that are
added at a step the updates since then.
"""

from __future__ import annotations

import pytest

from tests.faults.processes import Tasks
from tests.integration.shell import Shell
from tests.integration.test_counting import count, saved, table, updates
from tests.integration.test_lost_servers import counting, release, until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

AT = 40


def late(shell: Shell, steps: int) -> list[float]:
    """The updates since then, by worker."""
    rows = saved(shell, steps).model["late"]
    assert bool((rows == rows[:, :1]).all())
    counted: list[float] = rows[:, 0].tolist()
    return counted


@pytest.mark.thorough
@pytest.mark.slow(but=("sync",))
@pytest.mark.parametrize("strategy", ["async", "sync", "ssp"])
def test_a_server_is_killed_as_the_model_grows(shell: Shell, strategy: str) -> None:
    steps = 150
    words = ("--ps", 2, "--replicas", 2, "--workers", 2, "--strategy", strategy)
    running = counting(shell, steps, *words, program=("--grows-at", AT))
    until(shell, AT // (1 if strategy == "sync" else 2))
    assert Tasks(shell.directory / "run").kill("ps:0")
    release(shell)
    ended = running.ended()
    assert ended.status == 0, ended.text
    rows, added = updates(saved(shell, steps)), late(shell, steps)
    assert sum(rows) == steps
    if strategy == "sync":
        assert rows == [steps / 2] * 2 and added == [(steps - AT) / 2] * 2
        return
    assert rows == [table(saved(shell, steps))[worker] for worker in range(2)]
    # The first to reach that step adds them, and the other one at its next: one update without.
    assert steps - AT - 2 <= sum(added) <= steps - AT


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_a_worker_that_is_started_again_adds_them_before_its_first_step(
    shell: Shell, strategy: str, worker: int
) -> None:
    """Worker 0 is the chief, and the next one is when it is killed."""
    steps, own = 150, AT + 10 if strategy == "sync" else AT // 2 + 10
    words = ("--ps", 2, "--workers", 2, "--strategy", strategy, "--max-restarts", 3)
    fault = f"{worker}:{own}:in flight:kill"
    count(shell, steps, *words, faults=(fault,), attempts=0, program=("--grows-at", AT))
    rows, added = updates(saved(shell, steps)), late(shell, steps)
    assert sum(rows) == steps
    assert (steps - AT) - 2 <= sum(added) <= steps - AT
    if strategy == "sync":
        assert sum(added) == steps - AT
