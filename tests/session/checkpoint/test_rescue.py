"""What a worker says that cannot save what it has of a job that has lost a server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from trireme.launch.config.task_config import TaskConfig
from trireme.session.checkpoint import CheckpointData, list_checkpoints, rescue, step_of
from trireme.session.checkpoint.rescue import Rescue
from trireme.session.checkpoint.storage import Storage
from trireme.session.observers.progress import make_progress
from trireme.session.options import Options
from trireme.session.settings import Settings

DATA = CheckpointData(210, {"w": torch.ones(3)})


class Held:
    """A run directory whose lock another task holds, and does not let go of."""

    scheduled = True

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def settle(self, *, at_the_end: bool = False) -> None:
        pass

    def take(self, view: int) -> bool:
        return False

    def take_from_stopped(self, view: int) -> bool:
        return False


def test_what_is_lost_is_said_where_a_hung_chief_holds_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rescue, "_CHIEF_SECONDS", 0.0)
    values: Any = None  # nothing asks for them
    left = Rescue(210, 3, chief=False, lacks=(), values=values)
    said = left.save(cast(Storage, Held(tmp_path)))
    assert said.startswith("steps 1 to 210 are lost, unless the task that holds the lock")


STOPPED_CHIEF = """
import os, signal, sys
from pathlib import Path
from trireme.session.checkpoint.run_lock import RunLock, writer_here

lock = RunLock.claim(Path(sys.argv[1]), writer_here("worker:0", "job", epoch="one", view=3))
os.kill(os.getpid(), signal.SIGSTOP)
print(lock.held)
"""


@pytest.mark.processes
def test_a_worker_saves_what_it_has_though_the_chief_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rescue, "_CHIEF_SECONDS", 0.0)
    command = [sys.executable, "-c", STOPPED_CHIEF, str(tmp_path)]
    chief = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        _, status = os.waitpid(chief.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        task = TaskConfig(job="job", index=1)
        storage = Storage(Settings(task, Options(), tmp_path), make_progress("none"))
        storage.epoch = "one"
        storage.begin(0, restored=False)
        left = Rescue(210, 3, False, ("the optimizer's state",), lambda before: DATA)
        said = left.save(storage)
        assert said.startswith("the newest checkpoint was of none, and the values of step 210 are")
        storage.close()
        os.kill(chief.pid, signal.SIGCONT)
        assert chief.communicate(timeout=60)[0] == "False\n"
    finally:
        chief.kill()
        chief.wait()
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [210]
