"""Workers are killed: each update is in the values once, or not at all, and no example is lost.

The program is `programs/counting.py`: the values count the updates of each worker.
"""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
import torch

from tests.integration.shell import PROGRAMS, Ended, Shell
from trireme.ps.messages import WorkerProgress
from trireme.session.checkpoint import CheckpointData, latest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

BATCH = 4


def count(
    shell: Shell,
    steps: int,
    *words: object,
    faults: tuple[str, ...] = (),
    attempts: int = 12,
    program: tuple[object, ...] = (),
) -> Ended:
    """Runs the counting program to its end.

    Where workers are started again, worker 0 waits at its step 10 for so many attempts of worker 1.
    """
    named = (PROGRAMS / "counting.py", "--out", "out", "--max-steps", steps, *program)
    chosen = [word for fault in faults for word in ("--fault", fault)]
    wait = ("--wait-for", attempts) if "--max-restarts" in words else ()
    ended = shell.run(
        "run", *words, "--run-dir", "run", *named, "--batch-size", BATCH, *chosen, *wait
    )
    assert ended.status == 0, ended.text
    return ended


def notes(shell: Shell, worker: int) -> Counter[str]:
    """What a worker has noted: how often it attempted, and what came of it."""
    return Counter((shell.directory / "out" / f"notes-{worker}").read_text().split())


def saved(shell: Shell, steps: int) -> CheckpointData:
    """The checkpoint of the last step."""
    data = latest(shell.directory / "run", lambda path, error: pytest.fail(f"{path}: {error}"))
    assert data is not None and data.step == steps
    return data


def updates(data: CheckpointData) -> list[float]:
    """Each worker's updates as its row counts them; all elements of a row agree."""
    rows = data.model["rows"]
    assert torch.equal(rows, rows[:, :1].expand_as(rows))
    return rows[:, 0].tolist()


def table(data: CheckpointData) -> dict[int, int]:
    """Each worker's updates as the exactly-once table counts them."""
    rows = msgspec.convert(data.state["pushes"], list[WorkerProgress])
    return {row.worker: row.applied for row in rows}


def consumed(data: CheckpointData) -> list[list[int]]:
    """Which examples are in the values."""
    return data.state["consumed"]["train"]


@pytest.mark.slow
@pytest.mark.thorough
def test_a_worker_that_dies_twice_is_started_again_and_nothing_counts_twice(shell: Shell) -> None:
    """Worker 1 dies between two updates, and next with a push under way."""
    steps = 80
    faults = ("1:3:before:kill", "1:6:in flight:kill")
    ended = count(
        shell,
        steps,
        *("--ps", 1, "--workers", 2, "--strategy", "async", "--max-restarts", 2),
        faults=faults,
    )
    assert ended.err.count("worker:1 failed: killed by SIGKILL; started again") == 2
    data, (first, second) = saved(shell, steps), (notes(shell, 0), notes(shell, 1))
    rows = updates(data)
    assert rows == [table(data)[0], table(data)[1]]
    assert sum(rows) == steps
    assert first["attempted"] == first["applied"] == rows[0]
    # Of the one that was under way nobody but the server knows what became.
    assert second["attempted"] == second["applied"] + 1
    assert rows[1] in (second["applied"], second["attempted"])
    # Each update is of examples of its own, whoever died with some in hand.
    assert sum(stop - start for start, stop in consumed(data)) == steps * BATCH


@pytest.mark.thorough
def test_the_job_goes_on_without_a_killed_worker_and_its_examples_are_dealt_again(
    shell: Shell,
) -> None:
    steps, together = 30, 5
    ended = count(
        shell,
        steps,
        *("--ps", 2, "--workers", 2, "--strategy", "sync"),
        faults=(f"1:{together + 1}:before:kill",),
    )
    assert "worker:1 was killed by SIGKILL" in ended.err
    assert "; the job goes on with the 1 left" in ended.err
    data = saved(shell, steps)
    # Halves while there were two in a round.
    assert updates(data) == [steps - together / 2, together / 2]
    assert notes(shell, 0) == {"attempted": steps, "applied": steps}
    assert notes(shell, 1) == {"attempted": together, "applied": together}
    # Worker 1 held 16 batches. What it had not used was used by worker 0, and nothing left out.
    assert consumed(data) == [[0, (steps + together) * BATCH]]


@pytest.mark.thorough
def test_backup_workers_count_what_came_too_late(shell: Shell) -> None:
    steps = 40
    words = ("--ps", 1, "--workers", 3, "--strategy", "sync", "--aggregate", 2)
    # Worker 0 waits once, with values that the other two have gone on from.
    count(shell, steps, *words, program=("--wait-for", 28))
    data, known = saved(shell, steps), [notes(shell, worker) for worker in range(3)]
    assert updates(data) == [one["applied"] / 2 for one in known]
    assert [table(data)[worker] for worker in range(3)] == [one["applied"] for one in known]
    assert sum(one["applied"] for one in known) == 2 * steps
    assert all(one["attempted"] == one["applied"] + one["stale"] for one in known)
    assert sum(one["stale"] for one in known) > 0
    # A stale update's examples are dealt again.
    assert sum(stop - start for start, stop in consumed(data)) == 2 * steps * BATCH


@pytest.mark.slow(but=("sync backup",))
@pytest.mark.thorough
@pytest.mark.parametrize(
    "words",
    [
        ("--strategy", "async"),
        ("--strategy", "async", "--compress", "fp16", "--transport", "tcp"),
        ("--strategy", "sync", "--aggregate", 1),
    ],
    ids=["async", "async tcp fp16", "sync backup"],
)
def test_a_worker_of_two_replicas_pushes_once_for_both(
    shell: Shell, words: tuple[object, ...]
) -> None:
    steps = 40
    count(shell, steps, "--ps", 2, "--workers", 2, "--mesh", "dp=2", *words)
    data, known = saved(shell, steps), [notes(shell, worker) for worker in range(2)]
    rows = updates(data)
    assert rows == [table(data)[worker] for worker in range(2)]
    assert sum(rows) == steps
    assert [2 * row for row in rows] == [one["applied"] for one in known]  # both note it
    assert all(one["attempted"] == one["applied"] + one["stale"] for one in known)
    assert sum(stop - start for start, stop in consumed(data)) == steps * 2 * BATCH


@pytest.mark.thorough
@pytest.mark.slow(but=("--prefetch --transport tcp --compress bf16",))
@pytest.mark.parametrize(
    "words",
    [
        ("--compress", "fp16"),
        ("--prefetch",),
        ("--prefetch", "--transport", "tcp", "--compress", "bf16"),
    ],
    ids=" ".join,
)
def test_nothing_counts_twice_however_it_travels_when_a_worker_dies(
    shell: Shell, words: tuple[str, ...]
) -> None:
    """Worker 1 dies with a push under way. Small whole numbers are exact in half the bits too."""
    steps = 60
    ended = count(
        shell,
        steps,
        *("--ps", 1, "--workers", 2, "--strategy", "async", "--max-restarts", 1, *words),
        faults=("1:6:in flight:kill",),
    )
    assert ended.err.count("worker:1 failed: killed by SIGKILL; started again") == 1
    data = saved(shell, steps)
    rows = updates(data)
    assert rows == [table(data)[0], table(data)[1]]
    assert sum(rows) == steps
    assert sum(stop - start for start, stop in consumed(data)) == steps * BATCH
