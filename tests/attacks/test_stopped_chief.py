"""A chief that is stopped while it writes, and wakes when another one writes: it publishes nothing.

It is stopped at the worst moment: it has just found out that it may write, and only the renaming
is left.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trireme.session.checkpoint import CheckpointData, list_checkpoints, load, save, step_of
from trireme.session.run_lock import RunLock, writer_here

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

OLD_CHIEF = """
import os, signal, sys
from pathlib import Path

import torch
from trireme.session.checkpoint import CheckpointData, save
from trireme.session.run_lock import RunLock, writer_here

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
            (tmp_path / "writer.lock").unlink()
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
