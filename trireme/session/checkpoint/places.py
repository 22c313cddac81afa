"""Finds the place of a run directory, or of a checkpoint in one."""

from __future__ import annotations

from pathlib import Path

from trireme.location import location
from trireme.session.checkpoint.local_place import LocalPlace
from trireme.session.checkpoint.place import Location, Place
from trireme.stores import open_store

RunDir = str | Location | Place
"""What functions take for a run directory: a path, a URL such as `s3://bucket/run`, or a place."""


def place_of(run_dir: RunDir) -> Place:
    """Returns the place of a run directory.

    Raises:
        ConfigurationError: a URL is not complete, or its file system is not installed.
    """
    if isinstance(run_dir, Place):
        return run_dir
    where = location(run_dir)
    if isinstance(where, Path):
        return LocalPlace(where)
    found = open_store(where).place()
    assert isinstance(found, Place)
    return found


def place_of_checkpoint(path: str | Location) -> tuple[Place, Location]:
    """Returns the place of the run of a checkpoint, and the checkpoint's location.

    Raises:
        ConfigurationError: as `place_of`.
    """
    where = location(path)
    return place_of(where.parent.parent), where
