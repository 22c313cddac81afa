"""Checkpoints are read back, and compared with what was to be saved when it was copied."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from trireme.corruption.digests import Seal, digest, mend
from trireme.corruption.findings import Findings
from trireme.corruption.settings import Action
from trireme.errors import CheckpointError, CorruptedValues
from trireme.location import Location
from trireme.session.checkpoint import CheckpointData, load

_GROUPS = ("model", "optimizer", "average", "local", "tables")
_MOST_WRITES = 3


class SealedCheckpoints:
    """Takes the digests of each checkpoint that is submitted, and reads back what was written."""

    def __init__(self, task: str, action: Action, findings: Findings) -> None:
        self._task, self._action, self._findings = task, action, findings
        self._stop: CorruptedValues | None = None

    def check(self) -> None:
        """Raises what was found by the thread that writes, where it ends the job."""
        if self._stop is not None:
            raise self._stop

    def seal(self, data: CheckpointData) -> Callable[[Location], bool]:
        """Returns what compares a checkpoint, once it is written, with the data as it is now."""
        sealed = {key: Seal([tensor]) for key, tensor in _tensors(data).items()}
        attempts = iter(range(1, _MOST_WRITES))

        def is_good(path: Location) -> bool:
            try:
                written = _tensors(load(path, streamed=True))
            except CheckpointError as error:
                return self._found(f"{error}", next(attempts, None))
            for key, expected in sealed.items():
                tensor = written.get(key)
                if tensor is not None and digest([tensor]) == expected.digest:
                    continue
                held = _tensors(data)[key]
                where = "on its way to the disk"
                if digest([held]) != expected.digest:
                    flip, where = expected.find([held]), "in memory"
                    if flip is not None and self._action == "heal":
                        mend([held], flip)
                text = f"{key.partition('/')[2]!r} of {path.name} has changed {where}"
                return self._found(text, next(attempts, None))
            return True

        return is_good

    def _found(self, what: str, further: int | None) -> bool:
        """Says what is wrong; returns whether that is all: the checkpoint is not written again."""
        again = self._action == "heal" and further is not None
        text = f"what {self._task} has saved is not what it was to save: {what}"
        try:
            self._findings.add(text, stops=not again and self._action != "warn")
        except CorruptedValues as error:
            self._stop = error
            raise
        return not again


def _tensors(data: CheckpointData) -> Mapping[str, torch.Tensor]:
    return {
        f"{group}/{name}": tensor
        for group in _GROUPS
        for name, tensor in getattr(data, group).items()
    }
