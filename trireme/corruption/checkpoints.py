"""Checkpoints are read back, and compared with what was to be saved when it was copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from trireme.corruption.checks import Checks
from trireme.corruption.digests import Seal, digests
from trireme.errors import CheckpointError
from trireme.location import Location
from trireme.session.checkpoint import CheckpointData, load

_GROUPS = ("model", "optimizer", "average", "local", "tables")
_MOST_WRITES = 3


def sealed(data: CheckpointData, task: str, checks: Checks) -> Callable[[Location], bool]:
    """Returns what compares a checkpoint, once it is written, with the data as it is now.

    It returns whether the checkpoint need not be written again.
    """
    seal, further = Seal(_tensors(data)), iter(range(1, _MOST_WRITES))

    def is_good(path: Location) -> bool:
        wrong = _wrong(seal, path, heals=checks.action == "heal")
        if not wrong:
            return True
        again = checks.action == "heal" and next(further, None) is not None
        text = f"what {task} has saved is not what it was to save: {wrong}"
        checks.found(text, stops=not again and checks.action != "warn")
        return not again

    return is_good


def _wrong(seal: Seal, path: Location, *, heals: bool) -> str:
    try:
        written = dict(_tensors(load(path, streamed=True)))
    except CheckpointError as error:
        return f"{error}"
    for (name, _), expected in zip(seal.named, seal.digests, strict=True):
        if name not in written or digests([written[name]]) != (expected,):
            change = seal.changed()
            if change is not None and heals:
                change.mend()
            where = "on its way to the disk" if change is None else f"in memory: {change}"
            return f"{name.partition('/')[2]!r} of {path.name} has changed {where}"
    return ""


def _tensors(data: CheckpointData) -> Iterator[tuple[str, torch.Tensor]]:
    for group in _GROUPS:
        for name, tensor in getattr(data, group).items():
            yield f"{group}/{name}", tensor
