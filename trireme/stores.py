"""The interface of object stores, in which run directories may be, by the scheme of their URLs."""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trireme.errors import ConfigurationError
from trireme.location import RemotePath
from trireme.plugins import Plugins


class StoreError(OSError):
    """An object store has refused a request, or did not answer; says what to do.

    Attributes:
        denied: whether the store denies it to this user: it would do so again.
    """

    denied = False


class Uploads(ABC):
    """Uploads what changes in a local directory, until it is closed."""

    @abstractmethod
    def close(self) -> None:
        """Uploads what has changed last. May be called again."""


class Store(ABC):
    """One run directory in an object store. Its methods raise `StoreError`."""

    @abstractmethod
    def place(self) -> Any:
        """Returns where its checkpoints are: a `trireme.session.checkpoint.place.Place`."""

    @abstractmethod
    def mirror(self, directory: Path, names: Sequence[str], allowed: Callable[[], bool]) -> Uploads:
        """Begins to upload what changes in a local directory.

        Args:
            directory: the local directory.
            names: which files and folders in it.
            allowed: whether this process may upload now.
        """

    @abstractmethod
    def download(self, directory: Path) -> None:
        """Downloads into a local directory what was uploaded by `mirror`."""

    @abstractmethod
    def job(self) -> str:
        """Returns the id of the job that writes there, or wrote last; "" where there is none."""


@dataclass(frozen=True, slots=True)
class StoreType:
    """A kind of object store. Its module should import fast.

    Attributes:
        open: the function from a `RemotePath` to its `Store`, as `package.module:function`. It
            raises `ConfigurationError` where the store cannot be opened.
        shared: whether other processes see what one writes.
    """

    open: str
    shared: bool = True


STORES = Plugins("trireme.stores", "object store", StoreType)
"""Every installed kind of object store, by the scheme of its URLs."""


def open_store(where: RemotePath) -> Store:
    """Returns the object store of a run directory.

    Raises:
        ConfigurationError: a package that it needs is not installed, or it cannot be opened.
    """
    try:
        kind = STORES.load(where.scheme)
    except ConfigurationError as error:
        raise ConfigurationError(f"the run directory {where} cannot be opened: {error}") from error
    opened: Store = pkgutil.resolve_name(kind.open)(where)
    return opened
