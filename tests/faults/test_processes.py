"""Tasks are killed, stopped and continued by their names."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from tests.cli.test_commands import FINISHED
from tests.faults.processes import STARTED_BY, Tasks
from trireme.launch.run_directory import claim

pytestmark = pytest.mark.processes


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that looks like a task."""
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env={STARTED_BY: "{}"}) as started:
        yield started
        started.kill()


def tasks(run_dir: Path, **pids: int) -> Tasks:
    directory = claim(run_dir)
    named = {name.replace("_", ":"): pid for name, pid in pids.items()}
    directory.write_record(msgspec.structs.replace(FINISHED, state="running", pids=named))
    directory.release()
    return Tasks(run_dir)


def until(process: psutil.Process, stopped: bool) -> bool:
    deadline = time.monotonic() + 10.0
    while (process.status() == psutil.STATUS_STOPPED) != stopped:
        assert time.monotonic() < deadline, process.status()
    return True


def test_a_task_is_stopped_and_goes_on(process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    with tasks(tmp_path, worker_0=process.pid).stopped("worker:0") as stopped:
        assert stopped is not None and until(stopped, True)
    assert until(stopped, False)


def test_a_task_is_killed(process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    job = tasks(tmp_path, worker_0=process.pid)
    assert job.kill("worker:0")
    assert process.wait(10) == -9
    assert not job.kill("worker:0")


def test_nobody_else_is_hit(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        job = tasks(tmp_path, worker_0=other.pid)
        assert not job.kill("worker:0") and not job.kill("worker:1")
        with job.stopped("worker:0") as stopped:
            assert stopped is None
        assert other.poll() is None
        other.kill()
    assert not Tasks(tmp_path / "none").kill("worker:0")
