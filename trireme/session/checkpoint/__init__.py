"""Checkpoints: one format on disk, for every strategy and any number of tasks."""

from trireme.session.checkpoint.format import CheckpointData, describe, load, save, verify
from trireme.session.checkpoint.history import latest, list_checkpoints, prune, step_of

__all__ = [
    "CheckpointData",
    "describe",
    "latest",
    "list_checkpoints",
    "load",
    "prune",
    "save",
    "step_of",
    "verify",
]
