"""A chief that is stopped while it writes, and wakes when another one writes: it publishes nothing.

It is stopped at the worst moment: it has just found out that it may write, and only the renaming
is left.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trireme.session.checkpoint import CheckpointData, list_checkpoints, load, save, step_of
from trireme.session.checkpoint.run_lock import RunLock, writer_here

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

OLD_CHIEF = """
import os, signal, sys
from pathlib import Path

import torch
from trireme.session.checkpoint import CheckpointData, save
from trireme.session.checkpoint.run_lock import RunLock, writer_here

run_dir, moment = Path(sys.argv[1]), sys.argv[2]
lock = RunLock.claim(run_dir, writer_here("worker:0", "job", epoch="first", view=1))
save(run_dir, CheckpointData(10, {"w": torch.zeros(3)}), allowed=lock.check)

def stop():
    if moment == "before":
        os.kill(os.getpid(), signal.SIGSTOP)
    lock.check()
    if moment == "after":
        os.kill(os.getpid(), signal.SIGSTOP)

try:
    save(run_dir, CheckpointData(20, {"w": torch.full((3,), -1.0)}), allowed=stop)
    print("published", flush=True)
except Exception as error:
    print(type(error).__name__, flush=True)
"""


@pytest.mark.slow(but=("first-before", "second-after"))
@pytest.mark.thorough(but=("first-before", "second-after"))
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("successor", ["first", "second"])
def test_a_chief_that_wakes_publishes_nothing(tmp_path: Path, moment: str, successor: str) -> None:
    """Args: when it is stopped, and the epoch of who comes after it."""
    old = subprocess.Popen(
        [sys.executable, "-c", OLD_CHIEF, str(tmp_path), moment], stdout=subprocess.PIPE, text=True
    )
    try:
        _, status = os.waitpid(old.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        if successor != "first":
            # A stopped process keeps its lock: another job comes in only where locks are lost.
            shutil.rmtree(tmp_path / "writers")
        writer = writer_here("worker:1", "job", epoch=successor, view=2)
        lock = RunLock.claim(tmp_path, writer, first=successor != "first")
        save(tmp_path, CheckpointData(20, {"w": torch.ones(3)}), allowed=lock.check)
        os.kill(old.pid, signal.SIGCONT)
        said, _ = old.communicate(timeout=60)
    finally:
        old.kill()
        old.wait()
    assert said.strip() in ("CheckpointLockLost", "CheckpointError")
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [10, 20]
    assert torch.equal(load(list_checkpoints(tmp_path)[-1]).model["w"], torch.ones(3))
    lock.check()
    lock.release()


CLAIMING_CHIEF = """
import os, signal, sys
from pathlib import Path

import torch
from trireme.session.checkpoint import CheckpointData, save
from trireme.session.checkpoint.run_lock import RunLock, writer_here

def stopping(move):
    def moves(source, target):
        if "writer" in str(target):
            os.kill(os.getpid(), signal.SIGSTOP)
        move(source, target)
    return moves

os.rename, os.replace = stopping(os.rename), stopping(os.replace)
run_dir = Path(sys.argv[1])
try:
    writer = writer_here("worker:1", "job", epoch="first", view=5)
    lock = RunLock.claim(run_dir, writer, first=False)
    save(run_dir, CheckpointData(20, {"w": torch.full((3,), -1.0)}), allowed=lock.check)
    print("published", flush=True)
except Exception as error:
    print(type(error).__name__, flush=True)
"""


def test_a_chief_that_wakes_while_it_takes_over_does_not_take_over_from_its_successor(
    tmp_path: Path,
) -> None:
    """It has seen that it may have the directory, and only the taking is left."""
    writer = writer_here("worker:0", "job", epoch="first", view=4)
    first = RunLock.claim(tmp_path, writer)
    old = subprocess.Popen(
        [sys.executable, "-c", CLAIMING_CHIEF, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        _, status = os.waitpid(old.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        writer = writer_here("worker:2", "job", epoch="first", view=6)
        lock = RunLock.claim(tmp_path, writer, first=False)
        os.kill(old.pid, signal.SIGCONT)
        said, _ = old.communicate(timeout=60)
    finally:
        old.kill()
        old.wait()
    assert said.strip() == "ConfigurationError"
    lock.check()
    save(tmp_path, CheckpointData(20, {"w": torch.ones(3)}), allowed=lock.check)
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [20]
    first.release()
    lock.release()
