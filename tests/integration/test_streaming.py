"""A stream of which each example counts once an epoch, with workers killed at random.

The program is `programs/streaming.py`: the values count the updates of each example. The large one
is run by `pytest -m slow -s tests/integration/test_streaming.py`.
"""

from __future__ import annotations

import time

import pytest
import torch

from tests.integration.shell import PROGRAMS, Shell
from trireme.data.ledger import MOST_POSITIONS
from trireme.session.checkpoint import CheckpointData, latest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1200)]

EPOCHS = 2


def saved(shell: Shell) -> CheckpointData:
    data = latest(shell.directory / "run", lambda path, error: pytest.fail(f"{path}: {error}"))
    assert data is not None
    return data


def used(data: CheckpointData) -> torch.Tensor:
    """How often each example was used, by the ledger: the first ones of each epoch."""
    part = MOST_POSITIONS - 1
    counts = torch.zeros(data.model["counts"].numel())
    for start, stop in data.state["consumed"]["train"]:
        epoch = start // part
        numbers = torch.arange(start - epoch * part, min(stop - epoch * part, counts.numel()))
        counts[numbers * (1 + 2 * epoch) % counts.numel()] += 1
    return counts


def run(shell: Shell, size: int, batch: int, lives: int) -> None:
    steps = EPOCHS * size // batch
    words = ("run", "--ps", 1, "--workers", 2, "--strategy", "async", "--run-dir", "run")
    program = (PROGRAMS / "streaming.py", "--out", "out", "--size", size, "--batch-size", batch)
    half = (*program, "--max-steps", steps // 3)
    began = time.monotonic()
    first = shell.run(*words, *half)
    assert first.status == 0, first.text
    data = saved(shell)
    assert data.step == steps // 3
    assert data.model["counts"].equal(used(data)), "as often as the ledger says"
    ended = shell.run(
        *words,
        "--max-restarts",
        2 * lives,
        *program,
        "--lives",
        lives,
        "--steps-a-life",
        steps // 8,
    )
    assert ended.status == 0, ended.text
    data = saved(shell)
    counts = data.model["counts"]
    deaths = sum(
        len((shell.directory / "out" / f"deaths-{w}").read_text())
        for w in range(2)
        if (shell.directory / "out" / f"deaths-{w}").exists()
    )
    print(
        f"{size:,} examples, {EPOCHS} epochs, {deaths} workers killed, step "
        f"{data.step:,}: {int((counts == EPOCHS).sum()):,} examples counted {EPOCHS} times, "
        f"{int((counts != EPOCHS).sum()):,} otherwise, in {time.monotonic() - began:.0f} s"
    )
    assert deaths >= 2
    assert counts.unique().tolist() == [EPOCHS]


@pytest.mark.slow
def test_each_example_counts_once_though_workers_are_killed(shell: Shell) -> None:
    run(shell, 10_000, 50, lives=1)


@pytest.mark.slow
def test_a_million_examples_count_once_though_workers_are_killed(shell: Shell) -> None:
    run(shell, 1_000_000, 2_000, lives=3)
