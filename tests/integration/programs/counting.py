"""Whole gradients and a learning rate of 1: the values count every worker's updates.

Each worker notes an update before it pushes it, and again when it is acknowledged, with one write
each to a file of its own that outlives it.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import trireme
from tests.faults import Fault, Faults
from trireme.launch.environment import detect
from trireme.ps.messages import Applied
from trireme.session.hooks import Hook


class Counter(nn.Module):
    """One row a worker. Its gradient is -1 in the row of the worker that computes it.

    Another parameter like it may be added later.
    """

    def __init__(self, workers: int, worker: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(workers, 40))
        self.register_parameter("late", None)
        self.worker = worker

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        late = 0.0 if self.late is None else self.late[self.worker].sum()
        return -self.rows[self.worker].sum() - late

    def grow(self, optimizer: torch.optim.Optimizer) -> None:
        self.late = nn.Parameter(torch.zeros_like(self.rows))
        optimizer.add_param_group({"params": [self.late], "lr": 1.0})


class Notes(Hook):
    """Notes what was attempted and what was acknowledged."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def before_step(self, session: trireme.Session, batch: Any) -> None:
        os.write(self._file, b"attempted\n")

    def after_step(self, session: trireme.Session, result: trireme.StepResult) -> None:
        verdict = b"applied\n" if isinstance(result.verdict, Applied) else b"stale\n"
        os.write(self._file, verdict)


class Pause(Hook):
    """Has worker 0 wait before its step 10 until worker 1 has noted so many attempts."""

    def __init__(self, path: Path, count: int) -> None:
        self._path = path
        self._count = count
        self._step = 0

    def before_step(self, session: trireme.Session, batch: Any) -> None:
        self._step += 1
        if session.task.index == 0 and self._step == 10:
            deadline = time.monotonic() + 60
            while self._attempts() < self._count:
                assert time.monotonic() < deadline, "worker 1 did not get that far"
                time.sleep(0.01)

    def _attempts(self) -> int:
        return self._path.read_bytes().count(b"attempted") if self._path.exists() else 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-steps", type=int, required=True)
    parser.add_argument("--epochs", type=float, help="in place of --max-steps")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--fault", type=Fault.parse, action="append", default=[])
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each step")
    parser.add_argument("--pause-until", type=Path, help="no pauses once this file exists")
    parser.add_argument("--rows", type=int, help="the most workers that there will be")
    parser.add_argument("--wait-for", type=int, default=0, help="attempts of worker 1")
    parser.add_argument("--every-steps", type=int, help="saves so often, and not only at the end")
    parser.add_argument("--grows-at", type=int, help="the global step at which the model grows")
    options = parser.parse_args()

    task = detect()
    session = trireme.Session(
        Counter(options.rows or task.workers, task.index),
        lambda outputs, _: outputs,
        lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        max_steps=None if options.epochs else options.max_steps,
        checkpoint=trireme.Checkpoint(every_steps=options.every_steps, every_seconds=None),
        hooks=[
            Faults(options.fault, options.out),
            Pause(options.out / "notes-1", options.wait_for),
            Notes(options.out / f"notes-{task.index}"),
        ],
    )
    with session:
        data = TensorDataset(torch.zeros(1000, 1), torch.zeros(1000))
        for batch in session.loader(data, options.batch_size, epochs=options.epochs):
            if options.pause and not (options.pause_until and options.pause_until.exists()):
                time.sleep(options.pause)
            model, at = session.model, options.grows_at
            if at is not None and session.global_step >= at and model.late is None:
                model.grow(session.optimizer)
            session.step(batch)


main()
