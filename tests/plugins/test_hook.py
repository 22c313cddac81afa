"""A package that adds a hook to the sessions of a job by an option of the launch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plugins.installed import trireme

PROGRAM = """
import torch
import trireme

session = trireme.Session(
    torch.nn.Linear(2, 1), torch.nn.MSELoss(), lambda p: torch.optim.SGD(p, lr=0.0), max_steps=5
)
inputs = torch.ones(8, 2)
with session:
    while not session.should_stop():
        session.step((inputs, torch.full((8, 1), 10.0)))
"""


@pytest.mark.thorough
@pytest.mark.processes
def test_an_option_adds_it_to_the_sessions_of_a_job(directory: Path) -> None:
    (directory.parent / "far.py").write_text(PROGRAM)
    assert "--loss-limit LOSS" in trireme(directory, "run", "--help").stdout
    wrong = trireme(directory, "run", "--loss-limit", "low", "far.py", status=2)
    assert "loss-limit is 'low' (command line): it must be a number" in wrong.stderr
    ended = trireme(directory, "run", "--workers", 1, "--loss-limit", 5, "far.py", status=1)
    assert "is above --loss-limit 5" in ended.stdout + ended.stderr
