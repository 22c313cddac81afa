"""A worker whose main thread is stuck, while its heart beats, does not hold up the job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PYTHONPATH

PROGRAM = """
import threading

import torch
import trireme
from trireme.data import digits
from trireme.models import MLP

train, test = digits.load()
session = trireme.Session(
    MLP(64, 10), torch.nn.CrossEntropyLoss(), lambda p: torch.optim.SGD(p, lr=0.1), max_steps=200
)
with session:
    for number, batch in enumerate(session.loader(train, 50)):
        session.step(batch)
        if session.task.index == 1 and number == 10:
            print("worker:1 is stuck from here", flush=True)
            threading.Event().wait()
    print("ended at step", session.global_step)
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["sync", "ssp"])
def test_the_job_goes_on_without_a_worker_that_lives_and_makes_no_steps(
    strategy: str, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    launch = [sys.executable, "-m", "trireme", "run", "--ps", "1", "--workers", "2"]
    launch += ["--strategy", strategy, "--progress-timeout", "6", "program.py"]
    environ = {**os.environ, "PYTHONPATH": PYTHONPATH}
    ended = subprocess.run(
        launch, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=110
    )
    said = ended.stdout + ended.stderr
    assert "worker:1 is stuck from here" in said
    assert "ended at step 200" in said, said
    assert "it lives, and has made no step for" in said
    assert "its main thread is at program.py:" in said
    assert ended.returncode == 0, said
