"""A second job of the same program, while the first one runs, in the directory that it writes."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from tests.integration.shell import PYTHON, TRIREME, Ended, Running, Shell
from trireme.session.checkpoint import list_checkpoints, step_of, verify
from trireme.session.checkpoint.run_lock import WRITERS

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

PROGRAM = """
import time
from pathlib import Path

import torch
import trireme
from torch.utils.data import TensorDataset

inputs = torch.randn(100, 8)
session = trireme.Session(
    torch.nn.Linear(8, 2),
    torch.nn.CrossEntropyLoss(),
    lambda parameters: torch.optim.Adam(parameters),
    run_dir="shared",
    checkpoint=trireme.Checkpoint(every_seconds=None, every_steps=10, keep=3),
    log_every=1000,
)
with session:
    print("trains from step", session.global_step, flush=True)
    Path("began").touch()
    for batch in session.loader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), 10):
        session.step(batch)
        time.sleep(0.01)
"""

BY_PYTHON = PYTHON, ("program.py",)
BY_TRIREME = TRIREME, ("run", "--ps", "1", "--workers", "1", "program.py")


def start(shell: Shell, how: tuple[tuple[str, ...], tuple[str, ...]]) -> Running:
    command, words = how
    return shell.start(*words, command=command)


def refusals(ended: Ended) -> list[str]:
    return re.findall(r"worker:0 \(process \d+ on .*? writes to the run directory", ended.text)


@pytest.mark.thorough
@pytest.mark.slow(but=("run-run",))
@pytest.mark.parametrize(
    ("first", "second"),
    [(BY_TRIREME, BY_TRIREME), (BY_TRIREME, BY_PYTHON), (BY_PYTHON, BY_TRIREME)],
    ids=["run-run", "run-python", "python-run"],
)
def test_the_second_is_refused_by_name_and_the_first_goes_on(
    shell: Shell,
    first: tuple[tuple[str, ...], tuple[str, ...]],
    second: tuple[tuple[str, ...], tuple[str, ...]],
) -> None:
    (shell.directory / "program.py").write_text(PROGRAM)
    shared = shell.directory / "shared"
    holder = start(shell, first)
    until_saved(holder, shared, 10)
    (shell.directory / "began").unlink()

    ended = start(shell, second).ended()
    assert ended.status != 0
    assert not (shell.directory / "began").exists()  # it neither restored nor trained
    assert refusals(ended)
    assert "stop it with `" in ended.text
    assert "checkpoint/run_lock.py" not in ended.text  # no traceback from the depths

    until_saved(holder, shared, newest(shared) + 30)
    holder.send(signal.SIGINT)
    assert holder.ended().status == 130
    for path in list_checkpoints(shared):
        verify(path)


@pytest.mark.slow
@pytest.mark.thorough
def test_who_was_killed_lets_the_next_one_in(shell: Shell) -> None:
    (shell.directory / "program.py").write_text(PROGRAM)
    shared = shell.directory / "shared"
    killed = start(shell, BY_PYTHON)
    until_saved(killed, shared, 10)
    killed.send(signal.SIGKILL)
    killed.ended()
    assert (shared / WRITERS).exists()
    following = start(shell, BY_PYTHON)
    assert int(following.until(r"trains from step (\d+)")[1]) >= 10
    following.send(signal.SIGINT)
    assert following.ended().status == 130


def until_saved(running: Running, run_dir: Path, step: int) -> None:
    """Waits for a checkpoint of that step or a later one: each is deleted soon, or passed over."""
    deadline = time.monotonic() + 60.0
    while newest(run_dir) < step:
        assert running.process.poll() is None and time.monotonic() < deadline, f"no step {step}"
        time.sleep(0.01)


def newest(run_dir: Path) -> int:
    return max(map(step_of, list_checkpoints(run_dir)), default=0)
