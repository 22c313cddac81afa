"""Seeds the random numbers of torch, NumPy and `random` in the process of a worker.

In a deterministic run they are seeded from the global step before the program draws, so that a
run that is resumed at a step draws what an uninterrupted one does, and no state has to be saved.
"""

from __future__ import annotations

from trireme.data.draws import seed_all
from trireme.data.seeds import derive
from trireme.session.model.training_setup import TrainingSetup

_WORKER, _STEP, _LOOP, _EPOCH = 12, 13, 14, 15


class Seeding:
    """Seeds what the replica and the program's loop draw."""

    def __init__(self, setup: TrainingSetup) -> None:
        options = setup.settings.options
        self._seed, self._replica = options.seed, setup.replica
        self._deterministic = options.deterministic

    def begin(self, step: int) -> None:
        """Seeds this replica's numbers at the beginning of training, at a global step."""
        seed_all(derive(self._seed, _WORKER, self._replica))
        self.loop(step)

    def step(self, step: int) -> None:
        """Seeds what the model draws in the step after a global step, in a deterministic run."""
        self._seed_all(_STEP, self._replica, step)

    def loop(self, step: int) -> None:
        """Seeds what the loop draws between two steps, in a deterministic run."""
        self._seed_all(_LOOP, self._replica, step)

    def epoch(self, epoch: int) -> None:
        """Seeds what the program draws at the beginning of an epoch, alike in all workers."""
        self._seed_all(_EPOCH, epoch)

    def _seed_all(self, *path: int) -> None:
        if self._deterministic:
            seed_all(derive(self._seed, *path))
