"""A chief that is stopped while it writes, and wakes when another one writes.

It is stopped at the worst moment: only the renaming is left. What it saves then is an older
checkpoint than those of its successor.
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
from trireme.session.checkpoint.place import LocalPlace
from trireme.session.checkpoint.run_lock import LocalLock, writer_here

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

OLD_CHIEF = """
import os, signal, sys
from pathlib import Path

import torch
from trireme.session.checkpoint import CheckpointData, save
from trireme.session.checkpoint.run_lock import LocalLock, writer_here

run_dir = Path(sys.argv[1])
lock = LocalLock(run_dir).claim(writer_here("worker:0", "job", epoch="first", view=1))
save(run_dir, CheckpointData(10, {"w": torch.zeros(3)}), writer=lock.number)

rename = os.rename
def stopping(source, target):
    os.kill(os.getpid(), signal.SIGSTOP)
    rename(source, target)

os.rename = stopping
try:
    save(run_dir, CheckpointData(30, {"w": torch.full((3,), -1.0)}), writer=lock.number)
    print("published", lock.held, flush=True)
except Exception as error:
    print(type(error).__name__, lock.held, flush=True)
"""


@pytest.mark.slow(but=("first-True", "second-False"))
@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("successor", ["first", "second"])
def test_what_a_chief_saves_that_wakes_is_older_than_what_its_successor_saves(
    tmp_path: Path, saves: bool, successor: str
) -> None:
    """Args: whether its successor saves before it wakes, and the epoch of who comes after it."""
    old = subprocess.Popen(
        [sys.executable, "-c", OLD_CHIEF, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    data = CheckpointData(20, {"w": torch.ones(3)})
    try:
        _, status = os.waitpid(old.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        if successor != "first":
            # A stopped process keeps its lock: another job comes in only where locks are lost.
            shutil.rmtree(tmp_path / "writers")
        writer = writer_here("worker:1", "job", epoch=successor, view=2)
        lock = LocalPlace(tmp_path).claim(writer, first=successor != "first")
        if saves:
            save(tmp_path, data, writer=lock.number)
        os.kill(old.pid, signal.SIGCONT)
        said, _ = old.communicate(timeout=60)
    finally:
        old.kill()
        old.wait()
    assert said.split() == ["CheckpointError" if saves else "published", "False"]
    if not saves:
        save(tmp_path, data, writer=lock.number)
    steps = [step_of(path) for path in list_checkpoints(tmp_path)]
    assert steps == ([10, 20] if saves else [10, 30, 20])
    assert torch.equal(load(list_checkpoints(tmp_path)[-1]).model["w"], torch.ones(3))
    assert lock.held
    lock.release()


CLAIMING_CHIEF = """
import os, signal, sys
from pathlib import Path

import torch
from trireme.session.checkpoint import CheckpointData, save
from trireme.session.checkpoint.run_lock import LocalLock, writer_here

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
    lock = LocalLock(run_dir).claim(writer, first=False)
    save(run_dir, CheckpointData(20, {"w": torch.full((3,), -1.0)}), writer=lock.number)
    print("published", flush=True)
except Exception as error:
    print(type(error).__name__, flush=True)
"""


@pytest.mark.thorough
def test_a_chief_that_wakes_while_it_takes_over_does_not_take_over_from_its_successor(
    tmp_path: Path,
) -> None:
    """It has seen that it may have the directory, and only the taking is left."""
    writer = writer_here("worker:0", "job", epoch="first", view=4)
    first = LocalLock(tmp_path).claim(writer)
    old = subprocess.Popen(
        [sys.executable, "-c", CLAIMING_CHIEF, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        _, status = os.waitpid(old.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        writer = writer_here("worker:2", "job", epoch="first", view=6)
        lock = LocalLock(tmp_path).claim(writer, first=False)
        os.kill(old.pid, signal.SIGCONT)
        said, _ = old.communicate(timeout=60)
    finally:
        old.kill()
        old.wait()
    assert said.strip() == "ConfigurationError"
    assert lock.held
    save(tmp_path, CheckpointData(20, {"w": torch.ones(3)}), writer=lock.number)
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [20]
    first.release()
    lock.release()
