"""A loop that is not Trireme's, in one plain process."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from torch import nn

import trireme
from trireme.session.checkpoint import list_checkpoints


def test_an_interrupted_loop_saves_and_ends_though_it_never_asks(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    model = nn.Linear(3, 2)
    optimizer = trireme.distribute(
        model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=tmp_path
    )
    steps = 0
    with pytest.raises(SystemExit, match="130"):
        for _ in range(100):
            optimizer.zero_grad()
            model(torch.ones(4, 3)).square().mean().backward()
            optimizer.step()
            steps += 1
            if steps == 5:
                signal.raise_signal(signal.SIGTERM)
    assert optimizer.should_stop and steps < 10
    optimizer.close()
    assert [path.name for path in list_checkpoints(tmp_path)] == [
        f"step-{optimizer.global_step:09d}"
    ]
    assert signal.getsignal(signal.SIGTERM) is before
