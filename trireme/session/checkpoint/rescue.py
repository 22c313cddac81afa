"""Saves the values of a surviving worker after the loss of a server.

The optimizer's state, the moving average and the ledger of examples are lost with the server. Every
worker has the values of its last pull in memory, those of the lost server included. If the server
was lost during the pull, some values are of a later step than others, which can happen in
asynchronous training anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trireme.errors import CheckpointError
from trireme.session.checkpoint import CheckpointData, describe, list_checkpoints, step_of
from trireme.session.checkpoint.storage import Storage

__all__ = ["LACKS", "Rescue", "lost_steps"]

LACKS = "lacks"
"""The entry of a checkpoint's state that lists, in words, the parts that it lacks."""

_CHIEF_SECONDS = 3.0


@dataclass(frozen=True)
class Rescue:
    """The values of a surviving worker of a job that is over.

    Attributes:
        step: the global step of the values.
        view: the number of the last view.
        chief: whether this worker was chief in that view.
        lacks: the parts that no worker has, in words.
        values: makes the checkpoint, given the `state` of the newest one; {} where there is none.
    """

    step: int
    view: int
    chief: bool
    lacks: tuple[str, ...]
    values: Callable[[dict[str, Any]], CheckpointData]

    def save(self, storage: Storage) -> str:
        """Saves the values if they are newer than the newest checkpoint; deletes no checkpoint.

        The chief, which holds the directory's lock, saves first. Another worker saves if its values
        are newer still, or if the chief is gone or stopped.

        Returns:
            What is lost, in a sentence; "" where another worker reports it.
        """
        if not storage.scheduled or storage.run_dir is None:
            return f"{lost_steps(1, self.step)}: nothing was saved, for there is no run directory"
        storage.settle(at_the_end=True)
        taken = self._take(storage)
        newest, state = _newest(storage)
        if not taken:
            if self.step <= newest:
                return ""
            return (
                f"{lost_steps(newest + 1, self.step)}, unless the task that holds the lock on the "
                "run directory saves them: it still holds the lock"
            )
        if self.step <= newest:
            if not self.chief:
                return ""
            return f"the chief has no values newer than the newest checkpoint, of step {newest}"
        try:
            storage.write(self.values(state))
        except CheckpointError as error:
            return f"{lost_steps(newest + 1, self.step)}: their values could not be saved: {error}"
        before = f"step {newest}" if newest else "none"
        return (
            f"the newest checkpoint was of {before}, and the values of step {self.step} are saved "
            f"now; lost are {_listed(self.lacks)}, and what others have learned after that step"
        )

    def _take(self, storage: Storage) -> bool:
        deadline = time.monotonic() + (0.0 if self.chief else _CHIEF_SECONDS)
        while not storage.take(self.view):
            if self.chief or time.monotonic() >= deadline:
                return storage.take_from_stopped(self.view)
            time.sleep(0.05)
        return True


def _newest(storage: Storage) -> tuple[int, dict[str, Any]]:
    """Returns the step and the state of the newest checkpoint; 0 and {} where there is none."""
    assert storage.run_dir is not None
    paths = list_checkpoints(storage.run_dir)
    for path in reversed(paths):
        try:
            return step_of(path), describe(path).state
        except CheckpointError:
            continue
    return 0, {}


def lost_steps(first: int, last: int) -> str:
    """Returns in words which steps are lost."""
    return f"step {last} is lost" if first >= last else f"steps {first} to {last} are lost"


def _listed(words: tuple[str, ...]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
