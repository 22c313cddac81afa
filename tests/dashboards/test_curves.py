"""The curves of a job that is killed reach to its newest checkpoint."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from torch.nn.functional import mse_loss

import trireme
from tests.dashboards.test_board import curve


def test_a_checkpoint_has_the_curves_before_it_on_the_disk(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    session = trireme.Session(
        model,
        mse_loss,
        torch.optim.SGD(model.parameters(), lr=0.1),
        run_dir=tmp_path,
        checkpoint=trireme.Checkpoint(every_steps=6),
        log_every=2,
    )
    with session:
        for _ in range(7):
            session.step((torch.ones(3, 2), torch.zeros(3, 1)))
        assert session.board is not None
        written = threading.Event()
        session.board.submit("nothing", lambda writer: written.set())
        assert written.wait(60.0)  # what was asked of the writer before is done
        found = [step for step, _ in curve(tmp_path / "tensorboard", "loss")]
    assert found == [2, 4, 6]
