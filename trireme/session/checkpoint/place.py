"""Where a run's checkpoints live, a local directory or an object store, and how each is named.

    RUN/writers/000003/writer.json                  who writes: the newest entry (see `run_lock`)
    RUN/checkpoints/step-000001234-writer-3/        what writer 3 saved of step 1234

A save has a folder of its own, named by its step and by the number of its writer's claim. So no
writer touches what another one saves, and nobody has to be stopped from saving: a chief that was
replaced, and ends a save later than its successor, adds a checkpoint that counts as older, since
checkpoints are in the order of their writers' numbers, and then of their steps.

On a disk a folder is published by a rename: complete or not at all, even if the process dies.
Beside the published ones lie hidden ones, which `write` deletes where killed processes have left
them:

    .saving-NAME             being written
    .removing-NAME.TOKEN     no longer wanted
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

from trireme.files import make_directory, sync_directory
from trireme.location import STORES, Location, location, open_store
from trireme.session.checkpoint.manifest import CHECKPOINTS, in_order, order_of
from trireme.session.checkpoint.run_lock import LocalLock, RunLock, Writer
from trireme.session.checkpoint.tensors import WriteFile, write_file

Fill = Callable[[Location, WriteFile], None]  # writes all files of a checkpoint

_HIDDEN = re.compile(r"\.(saving-|removing-)(.+?)(\.[0-9a-f]{8})?")


class Place(ABC):
    """Where a run's checkpoints live. One appears whole or not at all, and never changes then."""

    run_dir: Location
    lock: RunLock

    def claim(self, writer: Writer, *, first: bool = True) -> RunLock:
        self.open(first=first)
        orders = (order_of(path.name) for path in self.list())
        above = max((order[0] for order in orders if order), default=0)
        return self.lock.claim(writer, first=first, above=above)

    def list(self) -> list[Location]:
        return in_order(self.folders())

    @abstractmethod
    def open(self, *, first: bool) -> None:
        """Makes the run directory, and checks, if the job begins, that claims can be made."""

    @abstractmethod
    def folders(self) -> Iterable[Location]:
        """Returns the published directories of checkpoints, and perhaps others."""

    @abstractmethod
    def write(self, name: str, fill: Fill) -> Location:
        """Writes a checkpoint, publishes it, and returns where it is; else `OSError`, and nothing.

        What the writer, or one before it, has left unfinished is deleted before.
        """

    @abstractmethod
    def remove(self, path: Location) -> None:
        """Deletes a checkpoint; it is never visible half deleted."""

    @abstractmethod
    def fetched(self, path: Location, *, content: bool = True) -> AbstractContextManager[Path]:
        """Provides a checkpoint as a local directory; without `content` values may be zeros."""


class LocalPlace(Place):
    """A run directory on a disk, of this host or shared."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir: Path = run_dir
        self.lock = LocalLock(run_dir)
        self._parent = run_dir / CHECKPOINTS

    def open(self, *, first: bool) -> None:
        make_directory(self.run_dir)

    def folders(self) -> Iterable[Location]:
        try:
            return list(self._parent.iterdir())
        except FileNotFoundError:
            return ()

    def write(self, name: str, fill: Fill) -> Location:
        final, staged = self._parent / name, self._parent / f".saving-{name}"
        make_directory(self._parent)
        self._sweep(name)
        staged.mkdir()
        try:
            fill(staged, write_file)
            sync_directory(staged)
            if os.path.lexists(final):  # its writer has saved the step, and went back behind it
                self.remove(final)
            os.rename(staged, final)
            sync_directory(self._parent)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
        return final

    def _sweep(self, name: str) -> None:
        """Deletes what the writer of a name, and those before it, have left unfinished.

        One that is alive, as it was replaced and stopped, then fails to publish: it finds nothing.
        """
        writer = (order_of(name) or (0, 0))[0]
        for path in list(self._parent.iterdir()):
            if hidden := _HIDDEN.fullmatch(path.name):
                with suppress(OSError):  # what cannot be deleted does no harm
                    if hidden[1] == "removing-":
                        shutil.rmtree(path)
                    elif (order_of(hidden[2]) or (0, 0))[0] <= writer:
                        self.remove(path)

    def remove(self, path: Location) -> None:
        name = path.name.removeprefix(".saving-")
        doomed = self._parent / f".removing-{name}.{secrets.token_hex(4)}"
        os.replace(_local(path), doomed)
        sync_directory(self._parent)
        shutil.rmtree(doomed, ignore_errors=True)

    def fetched(self, path: Location, *, content: bool = True) -> AbstractContextManager[Path]:
        return nullcontext(_local(path))


def _local(path: Location) -> Path:
    assert isinstance(path, Path)
    return path


RunDir = str | Location | Place  # a path, a URL such as `s3://bucket/run`, or a place


def place_of(run_dir: RunDir) -> Place:
    """Returns the place of a run directory."""
    if isinstance(run_dir, Place):
        return run_dir
    where = location(run_dir)
    if isinstance(where, Path):
        return LocalPlace(where)
    found = STORES.imported(where.scheme, "place")(open_store(where)[1])
    assert isinstance(found, Place)
    return found


def place_of_checkpoint(path: str | Location) -> tuple[Place, Location]:
    """Returns the place of the run of a checkpoint, and the checkpoint's location."""
    where = location(path)
    return place_of(where.parent.parent), where
