"""What is not trained, and who is started again: a teacher, and a buffer that counts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.conftest import clean_shell

pytestmark = [pytest.mark.processes, pytest.mark.thorough]

DIES_AT = 60
PROGRAM = f"""
import os, signal, time
import torch, trireme
from torch import nn

model = nn.Linear(4, 1)
model.teacher = nn.Parameter(torch.zeros(3), requires_grad=False)
model.register_buffer("seen", torch.zeros(1, dtype=torch.int64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with trireme.Session(model, nn.MSELoss(), optimizer, max_steps=1500) as session:
    first = session.global_step == 0
    print(f"begins {{first}} {{model.teacher[1].item():.0f}} {{model.seen.item()}}", flush=True)
    while not session.should_stop():
        session.step((torch.randn(8, 4), torch.randn(8, 1)))
        model.teacher.data = model.teacher.data + 1.0  # a write that PyTorch does not count
        model.seen += 1
        if first and session.worker.task.index == 0 and model.seen == {DIES_AT}:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)
"""


def test_who_is_started_again_has_what_others_have_made_of_untrained_tensors(
    tmp_path: Path,
) -> None:
    """It was the chief, and is again: it takes what another has handed out as chief meanwhile."""
    (tmp_path / "program.py").write_text(PROGRAM)
    words = ("run", "--ps", 1, "--workers", 2, "--strategy", "async", "--max-restarts", 1)
    with clean_shell(tmp_path) as shell:
        ended = shell.start(*words, "--run-dir", "run", "program.py").ended()
    assert ended.status == 0, ended.text
    begun = re.findall(r"worker:0 \| begins (True|False) (\d+) (\d+)", ended.text)
    assert begun[0] == ("True", "0", "0"), ended.text
    (again,) = begun[1:]
    assert again[0] == "False" and min(map(int, again[1:])) >= DIES_AT, ended.text
