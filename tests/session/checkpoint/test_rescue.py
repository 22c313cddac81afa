"""What a worker says that cannot save what it has of a job that has lost a server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from trireme.launch.config.task_config import TaskConfig
from trireme.session.checkpoint import CheckpointData, list_checkpoints, save, step_of, storage
from trireme.session.checkpoint.run_lock import RunLock, writer_here
from trireme.session.checkpoint.storage import Storage
from trireme.session.observers.progress import make_progress
from trireme.session.options import Options
from trireme.session.settings import Settings

DATA = CheckpointData(210, {"w": torch.ones(3)})


def storage_of(run_dir: Path, task: int) -> Storage:
    """Returns the run directory as a worker of the job has it."""
    settings = Settings(TaskConfig(job="job", index=task), Options(), run_dir)
    storage = Storage(settings, make_progress("none"))
    storage.epoch = "one"
    storage.begin(0, restored=False)
    return storage


def test_what_is_lost_is_said_where_a_hung_chief_holds_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_CHIEF_SECONDS", 0.0)
    values: Any = None  # nothing asks for them
    lock = RunLock.claim(tmp_path, writer_here("worker:0", "job", epoch="one", view=3))
    said = storage_of(tmp_path, 1).rescue(210, 3, chief=False, lacks=(), values=values)
    assert said.startswith("steps 1 to 210 are lost, unless the task that holds the lock")
    lock.release()


def test_values_without_the_rows_of_tables_are_not_saved(tmp_path: Path) -> None:
    """They would be newer than the newest checkpoint, and the next run would begin with them."""
    save(tmp_path, DATA)
    said = storage_of(tmp_path, 0).rescue(230, 3, chief=True, lacks=(), values=None)
    assert said.startswith("steps 211 to 230 are lost: no worker has the rows of sparse tables")
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [210]


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
    monkeypatch.setattr(storage, "_CHIEF_SECONDS", 0.0)
    command = [sys.executable, "-c", STOPPED_CHIEF, str(tmp_path)]
    chief = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        _, status = os.waitpid(chief.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        survivor = storage_of(tmp_path, 1)
        lacks = ("the optimizer's state",)
        said = survivor.rescue(210, 3, chief=False, lacks=lacks, values=lambda before: DATA)
        assert said.startswith("the newest checkpoint was of none, and the values of step 210 are")
        survivor.close()
        os.kill(chief.pid, signal.SIGCONT)
        assert chief.communicate(timeout=60)[0] == "False\n"
    finally:
        chief.kill()
        chief.wait()
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [210]
