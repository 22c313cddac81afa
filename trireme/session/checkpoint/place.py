"""Where a run's checkpoints live, a local directory or an object store, and how each is named.

    RUN/writers/000003/writer.json                  who writes: the newest entry (see `run_lock`)
    RUN/checkpoints/step-000001234-writer-3/        what writer 3 saved of step 1234

A save has a folder of its own, named by its step and by the number of its writer's claim. So no
writer touches what another one saves, and nobody has to be stopped from saving: a chief that was
replaced, and ends a save later than its successor, adds a checkpoint that counts as older, since
checkpoints are in the order of their writers' numbers, and then of their steps.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from trireme.errors import CheckpointError
from trireme.location import Location
from trireme.session.checkpoint.manifest import in_order, order_of
from trireme.session.checkpoint.run_lock import Claims, RunLock, Writer, writer_here
from trireme.session.checkpoint.tensors import FileRecord, WriteFile

ReuseFiles = Callable[[Location, Mapping[str, FileRecord]], None]
"""Puts files of another checkpoint of the run into one that is written, given their records."""

Fill = Callable[[Location, WriteFile, ReuseFiles], None]
"""Writes all files of a checkpoint into a directory, by the functions that it is given."""


class Fetched:
    """A checkpoint in a local directory, to be read there."""

    def __init__(
        self, path: Path, origin: Location, temporary: TemporaryDirectory[str] | None = None
    ) -> None:
        self.path, self.origin = path, origin
        self._temporary = temporary

    @contextmanager
    def reading(self, *, close: bool = True) -> Iterator[Path]:
        """Yields the local directory; a `CheckpointError` of the block names the checkpoint."""
        failed = True
        try:
            yield self.path
            failed = False
        except CheckpointError as error:
            if self.path == self.origin:
                raise
            named = str(error).replace(str(self.path), str(self.origin))
            raise type(error)(named) from error
        finally:
            if close or failed:
                self.close()

    def close(self) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()


class Place(ABC):
    """Where a run's checkpoints live.

    A checkpoint appears whole or not at all, and once published it does not change.

    Attributes:
        run_dir: the run directory.
        claims: those of its writers.
    """

    run_dir: Location
    claims: Claims

    def claim(self, writer: Writer, *, first: bool = True) -> RunLock:
        """Takes the run directory for this process; makes it if it is not there."""
        self.open(first=first)
        orders = (order_of(path.name) for path in self.list())
        return RunLock.claim(
            self.claims, writer, first=first, above=max((o[0] for o in orders if o), default=0)
        )

    @contextmanager
    def claimed(self) -> Iterator[int]:
        """Yields the number of a claim that a program has for a moment, outside of a job."""
        lock = self.claim(writer_here("program", "program", epoch=uuid.uuid4().hex))
        try:
            yield lock.number
        finally:
            lock.release()

    def list(self) -> list[Location]:
        """Returns the run's checkpoints, oldest first, damaged ones too."""
        return in_order(self.folders())

    @abstractmethod
    def open(self, *, first: bool) -> None:
        """Makes the run directory, and checks, if the job begins, that claims can be made."""

    @abstractmethod
    def prepare(self) -> None:
        """Checks, by the holder of the lock, that checkpoints can be written."""

    @abstractmethod
    def folders(self) -> Iterable[Location]:
        """Returns the published directories of checkpoints, and perhaps others."""

    def has(self, path: Location) -> bool:
        """Returns whether a checkpoint is there still, and whole, as far as is easily seen."""
        return True

    @abstractmethod
    def write(self, name: str, fill: Fill) -> Location:
        """Writes a checkpoint, publishes it, and returns where it is.

        What the writer, or one before it, has left unfinished is deleted before.

        Args:
            name: the name of the save; of one writer only one process at a time writes.
            fill: writes the files, `state.json` last.

        Raises:
            OSError: it cannot be written; nothing is published.
        """

    @abstractmethod
    def remove(self, path: Location) -> None:
        """Deletes a checkpoint; it is never visible half deleted."""

    @abstractmethod
    def fetch(self, path: Location, *, content: bool = True) -> Fetched:
        """Returns a checkpoint as local files.

        Args:
            path: the checkpoint.
            content: whether the values of tensors are needed. Without them a file of tensors may
                have zeros in their place.

        Raises:
            CheckpointError: there is no such checkpoint.
            ConfigurationError: the place cannot be read now.
        """
