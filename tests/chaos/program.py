"""MNIST's network, and beside it counters: whole gradients, at a learning rate of 1, count updates.

The counters have a row for each incarnation of each worker. The gradient is -1 in the row of the
incarnation that computes it, so that the row says how many of its updates are in the values. The
counters are three parameters, before, between and behind those of the network: every server has
some of them.

What is attempted and what is acknowledged is noted with one write each, with the time of the
monotonic clock, to a file of each process that outlives it.
"""

from __future__ import annotations

import argparse
import os
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import trireme
from examples.images import mnist
from tests.chaos.accounts import COUNTERS, Note
from trireme.launch.environment import detect
from trireme.models import MLP
from trireme.ps.client.lanes import Lanes, Transmit
from trireme.ps.messages import Applied, Push
from trireme.session.hooks import Hook

WORKERS, INCARNATIONS, WIDTH = 8, 64, 64
HIDDEN = 32
ENDLESS = 10**9
SAVE_EVERY = 2500


class Counted(nn.Module):
    """A network between counters."""

    def __init__(self, ballast: int = 0) -> None:
        super().__init__()
        network = MLP(784, HIDDEN, 10)
        # Bytes to push and pull, in the sum of the loss, so that each has a gradient.
        self.ballast = nn.Parameter(torch.zeros(ballast // 4)) if ballast else None
        self.before = counters()
        self.hidden = network.hidden1
        self.between = counters()
        self.output = network.output
        self.behind = counters()
        self.row = (0, 0)  # of the incarnation that trains

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.output(torch.relu(self.hidden(images)))

    def count(self) -> torch.Tensor:
        """What is added to the loss, to count one update."""
        heavy = torch.zeros(()) if self.ballast is None else self.ballast.sum()
        return heavy - sum(getattr(self, name)[self.row].sum() for name in COUNTERS)

    def groups(self, learning_rate: float) -> list[dict[str, Any]]:
        """The groups of parameters, for an optimizer."""
        own = [getattr(self, name) for name in COUNTERS]
        network = [*self.hidden.parameters(), *self.output.parameters()]
        heavy = [] if self.ballast is None else [{"params": [self.ballast], "lr": 1e-3}]
        return [{"params": network, "lr": learning_rate}, {"params": own, "lr": 1.0}, *heavy]


def counters() -> nn.Parameter:
    return nn.Parameter(torch.zeros(WORKERS, INCARNATIONS, WIDTH))


class Notes(Hook):
    """Notes what this process begins, attempts, and what is acknowledged."""

    def __init__(self, directory: Path, model: Counted) -> None:
        path = directory / f"notes-{detect().index}-{os.getpid()}"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._model = model
        self._tick = Lanes.tick
        self._rejoined = 0

    def note_retries(self) -> AbstractContextManager[object]:
        """Notes the pushes that are sent again while the block runs."""

        def tick(lanes: Lanes, now: float) -> list[Transmit]:
            again = self._tick(lanes, now)
            for each in again:
                if isinstance(each.message, Push):
                    self._note("retried")
            return again

        return mock.patch.object(Lanes, "tick", tick)

    def on_start(self, session: trireme.Session) -> None:
        self._choose(session)
        self._note("joined", time.process_time())

    def before_step(self, session: trireme.Session, batch: Any) -> None:
        self._choose(session)
        self._rejoined = session.worker.rejoined
        self._note("attempted")

    def after_step(self, session: trireme.Session, result: trireme.StepResult) -> None:
        if isinstance(result.verdict, Applied):
            self._note("acknowledged")
        elif session.worker.rejoined == self._rejoined:
            self._note("stale")
        else:  # it was taken for lost meanwhile: nobody has told it what became of the push
            self._note("unknown")

    def on_stop(self, session: trireme.Session, reason: str) -> None:
        self._choose(session)
        self._note("ended")

    def _choose(self, session: trireme.Session) -> None:
        incarnation = session.worker.backend.options.incarnation  # type: ignore[attr-defined]
        self._model.row = (session.task.index, incarnation)

    def _note(self, what: str, figure: float = 0.0) -> None:
        note = Note(what, *self._model.row, time.monotonic(), figure)
        os.write(self._file, note.line().encode())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--notes", type=Path, required=True)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--ballast", type=int, default=0, help="MB of values more")
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each step")
    parser.add_argument("--until", type=Path, help="end the loop when this file exists")
    options = parser.parse_args()
    train, _, _ = mnist.load(options.data_dir)
    model = Counted(options.ballast << 20)
    entropy, notes = nn.CrossEntropyLoss(), Notes(options.notes, model)
    session = trireme.Session(
        model,
        lambda outputs, targets: entropy(outputs, targets) + model.count(),
        lambda _: torch.optim.SGD(model.groups(options.learning_rate), lr=options.learning_rate),
        max_steps=ENDLESS,
        checkpoint=trireme.Checkpoint(every_seconds=None, every_steps=SAVE_EVERY, keep=10_000),
        hooks=[notes],
        log_every=1000,
    )
    with notes.note_retries(), session:
        for batch in session.loader(train, options.batch_size):
            time.sleep(options.pause)
            session.step(batch)
            if options.until is not None and options.until.exists():
                break


if __name__ == "__main__":
    main()
