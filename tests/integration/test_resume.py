"""A run that was stopped and goes on is, bit by bit, the run that was never stopped."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.shell import PROGRAMS, Ended, Shell
from trireme.session.checkpoint import CheckpointData, latest, list_checkpoints

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

STEPS, STOPPED = 60, 23
"""The network has dropout, the loader's transform draws noise, and the learning rate decays."""


def train(shell: Shell, run_dir: str, *words: object, servers: int = 1) -> Ended:
    return shell.run(
        *("run", "--ps", servers, "--workers", 2, "--strategy", "sync", "--run-dir", run_dir),
        *(PROGRAMS / "train.py", "--out", "out", "--max-steps", STEPS, "--every-steps", 20),
        *words,
    )


def saved(shell: Shell, run_dir: str) -> CheckpointData:
    data = latest(shell.directory / run_dir, lambda path, error: pytest.fail(f"{path}: {error}"))
    assert data is not None
    return data


def assert_same_bits(one: CheckpointData, other: CheckpointData) -> None:
    assert one.step == other.step
    for mine, theirs in (
        (one.model, other.model),
        (one.average, other.average),
        (one.optimizer, other.optimizer),
    ):
        assert mine.keys() == theirs.keys() and mine
        assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []
    assert one.state["consumed"] == other.state["consumed"]


def report(shell: Shell, worker: int) -> dict[str, Any]:
    return json.loads((shell.directory / f"out/worker-{worker}.json").read_text())


def truncate_the_newest(run_dir: Path) -> Path:
    """Cuts the newest checkpoint's model short, as a full disk or a crash might."""
    newest = list_checkpoints(run_dir)[-1]
    path = newest if isinstance(newest, Path) else newest.path
    shard = next(iter(path.glob("model*.safetensors")))
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size // 2)
    return path


@pytest.mark.thorough
def test_a_stopped_run_goes_on_to_the_very_bits_of_one_that_was_not(shell: Shell) -> None:
    assert train(shell, "whole").status == 0
    whole = saved(shell, "whole")
    assert whole.step == STEPS

    # Somebody sends the launcher SIGTERM in the middle of a step of worker 0.
    stopped = train(shell, "stopped", "--fault", f"0:{STOPPED}:before:stop job")
    assert stopped.status == 130, stopped.text
    assert "trireme: interrupted after " in stopped.err
    assert "Traceback" not in stopped.text and "error" not in stopped.text
    at = saved(shell, "stopped").step
    assert STOPPED <= at < STEPS

    # Goes on with another number of servers.
    directory = shell.directory
    shutil.copytree(directory / "stopped", directory / "damaged")
    ended = train(shell, "stopped", servers=2)
    assert ended.status == 0, ended.text
    assert f"worker:0 | restoring step {at}\n" in ended.out
    assert report(shell, 0)["restored_from"] == at
    assert report(shell, 1)["applied"] == list(range(at + 1, STEPS + 1))
    assert_same_bits(saved(shell, "stopped"), whole)

    # With as many as before; the newest is damaged: that is said, and the one before it serves.
    damaged = truncate_the_newest(directory / "damaged")
    ended = train(shell, "damaged")
    assert ended.status == 0, ended.text
    (warning,) = [line for line in ended.text.splitlines() if "passing over" in line]
    assert damaged.name in warning
    assert report(shell, 0)["restored_from"] == 20
    assert_same_bits(saved(shell, "damaged"), whole)
