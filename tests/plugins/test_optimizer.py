"""A package that adds an optimizer, which servers run as a process without servers does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugins.installed import environ, trireme

PROGRAM = """
import torch
import trireme
from trireme_sign import SignMomentum

torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
inputs, targets = torch.randn(16, 4), torch.randn(16, 2)
optimizer = trireme.distribute(model, SignMomentum(model.parameters(), lr=0.01), max_steps=20)
for _ in range(20):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
print("learned", *(f"{float(p.detach().sum()):.6f}" for p in model.parameters()))
"""


def learned(output: str) -> list[str]:
    (line,) = (line for line in output.splitlines() if "learned" in line)
    return line.partition("learned ")[2].split()


@pytest.mark.thorough
@pytest.mark.processes
def test_servers_learn_what_one_process_does(directory: Path) -> None:
    (directory.parent / "sign.py").write_text(PROGRAM)
    alone = subprocess.run(
        [sys.executable, "sign.py"], cwd=directory.parent, env=environ(directory), text=True,
        capture_output=True, timeout=120, check=True,
    )  # fmt: skip
    spread = trireme(directory, "run", "--ps", 2, "--strategy", "sync", "sign.py")
    assert len(learned(alone.stdout)) == 4
    assert learned(spread.stdout) == learned(alone.stdout)
