"""The interface of where a run's checkpoints live: a local directory, or an object store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Protocol

from trireme.errors import CheckpointError
from trireme.location import RemotePath
from trireme.session.checkpoint.manifest import Manifest
from trireme.session.checkpoint.run_lock import Writer
from trireme.session.checkpoint.tensors import FileRecord, WriteFile

Location = Path | RemotePath
"""A local directory, or one of an object store."""

ReuseFiles = Callable[[Location, Mapping[str, FileRecord]], None]
"""Puts files of another checkpoint of the run into one that is written, given their records."""

Fill = Callable[[Location, WriteFile, ReuseFiles], None]
"""Writes all files of a checkpoint into a directory, by the functions that it is given."""


class Lock(Protocol):
    """The right to write to a run directory; see `RunLock` and `RemoteLock`."""

    writer: Writer

    @property
    def held(self) -> bool:
        """Whether this process may write."""
        ...

    def check(self) -> None:
        """Checks that this process may write.

        Raises:
            CheckpointLockLost: another process may; names it.
        """
        ...

    def release(self) -> None:
        """Releases the lock. May be called again."""
        ...


@dataclass
class Fetched:
    """A checkpoint in a local directory, to be read there; as a context, closes itself.

    Attributes:
        path: the local directory.
        origin: where the checkpoint lives.
    """

    path: Path
    origin: Location
    _temporary: TemporaryDirectory[str] | None = None

    def __enter__(self) -> Fetched:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
        if isinstance(error, CheckpointError) and self.path != self.origin:
            named = str(error).replace(str(self.path), str(self.origin))
            raise type(error)(named) from error

    def close(self) -> None:
        """Deletes what was copied."""
        if self._temporary is not None:
            self._temporary.cleanup()


@contextmanager
def fetched_errors(fetched: Fetched) -> Iterator[None]:
    """Names the checkpoint, and not its copy, in a `CheckpointError` of the block."""
    try:
        yield
    except CheckpointError as error:
        fetched.__exit__(type(error), error, error.__traceback__)
        raise


class Place(ABC):
    """Where a run's checkpoints live.

    A checkpoint appears whole or not at all, and once published it does not change. Its name is
    `RUN/checkpoints/step-000001234`, in every place.

    Attributes:
        run_dir: the run directory.
    """

    run_dir: Location

    @abstractmethod
    def claim(self, writer: Writer, *, first: bool = True) -> Lock:
        """Takes the run directory for this process; makes it if it is not there.

        Args:
            writer: this process, with the view in which it is chief.
            first: whether the job begins; see `RunLock.claim`.

        Raises:
            ConfigurationError: another process writes there; names it.
            OSError: it cannot be written.
        """

    @abstractmethod
    def prepare(self) -> None:
        """Checks, by the holder of the lock, that checkpoints can be written.

        Raises:
            OSError: they cannot.
        """

    @abstractmethod
    def list(self) -> dict[str, Location]:
        """Returns the directories of checkpoints, damaged ones and others, by name.

        Raises:
            OSError: they cannot be listed.
        """

    @abstractmethod
    def checkpoint(self, name: str) -> Location:
        """Returns where the checkpoint of a name such as `step-000001234` is, or would be."""

    def has(self, path: Location) -> bool:
        """Returns whether a checkpoint is there still, and whole, as far as is easily seen."""
        return True

    @abstractmethod
    def write(self, name: str, fill: Fill, allowed: Callable[[], None]) -> Location:
        """Writes a checkpoint and publishes it; it replaces an earlier one of its name.

        Args:
            name: such as `step-000001234`.
            fill: writes the files.
            allowed: called right before the checkpoint is published; raises where this process may
                no longer write.

        Returns:
            Where it is.

        Raises:
            OSError: it cannot be written; nothing is published.
            CheckpointLockLost: another process writes there.
        """

    @abstractmethod
    def remove(self, path: Location) -> None:
        """Deletes a checkpoint; it is never visible half deleted.

        Raises:
            OSError: it cannot be deleted.
        """

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

    @abstractmethod
    def verify_content(self, path: Location, manifest: Manifest) -> None:
        """Verifies the size and the checksum of each file of a checkpoint.

        Raises:
            CheckpointError: a file is missing, or differs from what was written; names it.
        """
