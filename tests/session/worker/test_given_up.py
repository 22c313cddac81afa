"""A worker that the job gives up while it asks the servers for something besides an update."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trireme
from tests.process_groups import ProcessGroup, run_process_group
from trireme.errors import Fenced


def fenced_once(ask: Callable[..., Any]) -> Callable[..., Any]:
    """Fails the first time, as a server does for an incarnation that was replaced."""
    left = [Fenced("worker:0 was started anew", 0)]

    def asked(*given: Any, **named: Any) -> Any:
        if left:
            raise left.pop()
        return ask(*given, **named)

    return asked


def train(name: str, run_dir: Path) -> tuple[int, int]:
    torch.manual_seed(0)
    session = trireme.Session(
        nn.Linear(4, 2),
        nn.MSELoss(),
        lambda params: torch.optim.SGD(params, lr=0.1),
        run_dir=run_dir,
        max_steps=100,
        checkpoint=trireme.Checkpoint(every_seconds=None, every_steps=4),
    )
    batch = torch.ones(8, 4), torch.ones(8, 2)
    with session:
        backend = session.worker.backend
        setattr(backend, name, fenced_once(getattr(backend, name)))
        while not session.should_stop():
            session.step(batch)
            if session.global_step == 6:
                session.stop("enough")
    return session.worker.rejoined, session.global_step


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["stop", "saving"])
def test_it_comes_back(name: str, tmp_path: Path) -> None:
    group = ProcessGroup(servers=1, strategy="sync")
    assert run_process_group(group, train, name, tmp_path).values == [(1, 7)]
