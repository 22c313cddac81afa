"""One worker speaks for the job at its end, however unequally they end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PYTHONPATH

PROGRAM = """
import time

import torch
import trireme
from trireme.data import digits
from trireme.models import MLP


def wait_until_the_chief_has_left(session):
    deadline = time.monotonic() + 60
    while session.task.index == 1 and len(session.worker.lifecycle.member.view.workers) > 1:
        assert time.monotonic() < deadline, "worker:0 did not leave"
        time.sleep(0.01)


train, test = digits.load()
session = trireme.Session(
    MLP(64, 10), torch.nn.CrossEntropyLoss(), lambda p: torch.optim.SGD(p, lr=0.1), max_steps=50
)
with session:
    for batch in session.loader(train, 50):
        session.step(batch)
        if session.should_stop():  # the last update is made: nobody waits for this worker
            wait_until_the_chief_has_left(session)
    if session.is_chief:
        print("the chief is", session.task.name)
"""


@pytest.mark.thorough
@pytest.mark.processes
def test_nobody_takes_over_from_a_chief_that_has_finished(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    launch = [sys.executable, "-m", "trireme", "run", "--ps", "1", "--workers", "2", "program.py"]
    environ = {**os.environ, "PYTHONPATH": PYTHONPATH}
    ended = subprocess.run(
        launch, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=110
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("the chief is worker:0") == 1
    assert "the chief is worker:1" not in ended.stdout
    assert ended.stdout.count("global steps in") == 1
